// The same run outside the page: as Python, as curl.

/** vector: what was sent; text: the sentence, or null when there was none or it was defended. */
export function python(options, { text, vector, model }) {
  const { rounds, ...rest } = options;
  const named = rounds ? { ...rest, refine: "encoder", rounds, candidates: 16 } : rest;
  const call = Object.entries(named).map(([key, value]) => `${key}=${literal(value)}`).join(", ");
  const lines = ["from unembed import Inverter", "", `inverter = Inverter.from_pretrained(${JSON.stringify(model)})`];
  if (text !== null) {
    lines.push(`[found] = inverter.reconstruct(${JSON.stringify(text)}, ${call})`, "print(found.text, found.cosine)");
  } else {
    lines.push(`vector = ${short(vector)}`, `[found] = inverter.invert(vector, ${call})`, "print(found.text)");
  }
  return lines.join("\n") + "\n";
}

export function curl(options, { vector, origin }) {
  const settings = Object.entries(options).filter(([, value]) => value !== null);
  const body = JSON.stringify(Object.fromEntries(settings)).slice(0, -1);
  return [
    `curl -N ${origin}/api/stream \\`,
    "  -H 'Content-Type: application/json' \\",
    `  -d '${body}, "vector": ${short(vector)}}'`,
  ].join("\n") + "\n";
}

function literal(value) {
  return value === null ? "None" : JSON.stringify(value);
}

function short(vector) {
  return `[${vector.map((x) => Number(x.toPrecision(6))).join(", ")}]`;
}
