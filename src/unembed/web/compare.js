// What survived: differences between two texts, and the score of their tokens.

/**
 * Compare two texts word by word: for each a list of {word, fate}, in which fate is "same", "moved" (the
 * other text has the word elsewhere) or "only" (it has not). Capitals do not count.
 */
export function difference(left, right) {
  const a = split(left), b = split(right);
  const same = (i, j) => a[i].trim().toLowerCase() === b[j].trim().toLowerCase();
  const best = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i][j] = same(i, j) ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
  }
  const marked = [[], []];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && same(i, j)) {
      marked[0].push({ word: a[i++], fate: "same" });
      marked[1].push({ word: b[j++], fate: "same" });
    } else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) {
      marked[0].push({ word: a[i++], fate: "only" });
    } else {
      marked[1].push({ word: b[j++], fate: "only" });
    }
  }
  match(...marked);
  return marked;
}

/** Call moved what is left over on both sides. */
function match(left, right) {
  const spare = new Map();
  for (const each of right) {
    if (each.fate === "only") spare.set(key(each), [...(spare.get(key(each)) ?? []), each]);
  }
  for (const each of left) {
    const other = each.fate === "only" && spare.get(key(each))?.pop();
    if (other) each.fate = other.fate = "moved";
  }
}

function key({ word }) {
  return word.trim().toLowerCase();
}

/** Harmonic mean of precision and recall of the tokens as multisets: order does not count. */
export function tokenF1(left, right) {
  if (!left.length && !right.length) return 1;
  const counts = new Map();
  for (const id of left) counts.set(id, (counts.get(id) ?? 0) + 1);
  let common = 0;
  for (const id of right) {
    if (counts.get(id) > 0) {
      common++;
      counts.set(id, counts.get(id) - 1);
    }
  }
  return (2 * common) / (left.length + right.length);
}

/** Words and marks of punctuation, each with the space before it. */
function split(text) {
  return text.match(/\s*(?:[\p{L}\p{N}\p{M}]+(?:['’][\p{L}]+)*|[^\s\p{L}\p{N}\p{M}])/gu)?.map((w) => w.replace(/^\s+/, " ")) ?? [];
}
