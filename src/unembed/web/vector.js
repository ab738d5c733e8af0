// Vectors: reading them, what a defender might do to them, and their colours.

/** Read a vector from what people paste: a list, a list of lists, or an object around one. */
export function parse(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    // Not JSON: numbers between commas, spaces or line ends, perhaps in the brackets numpy prints.
    const parts = text.replace(/[[\]()]/g, " ").split(/[\s,;]+/).filter(Boolean);
    value = parts.map(Number);
  }
  for (let depth = 0; depth < 4 && value && !isNumbers(value); depth++) {
    value = Array.isArray(value) ? value[0] : (value.vector ?? value.embedding ?? value.data ?? value.vectors);
  }
  if (!isNumbers(value)) throw new Error("This is not a vector. Expected a list of numbers such as [0.02, -0.05, …].");
  return value;
}

/** Read the first vector of a .npy file. */
export function parseNpy(buffer) {
  const bytes = new DataView(buffer);
  const magic = buffer.byteLength > 12 && bytes.getUint32(0) === 0x934e554d;
  if (!magic) throw new Error("This is not a .npy file.");
  const wide = bytes.getUint8(6) > 1;
  const start = (wide ? 12 : 10) + (wide ? bytes.getUint32(8, true) : bytes.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(buffer.slice(10, start));
  const type = /'descr':\s*'([<|])(f4|f8|f2|i1|u1)'/.exec(header)?.[2];
  const shape = /'shape':\s*\(([^)]*)\)/.exec(header)?.[1].split(",").map(Number).filter(Boolean);
  if (!type || !shape || shape.length < 1 || shape.length > 2 || /True/.test(header)) {
    throw new Error("This .npy holds no plain array of vectors. Save one as float32, of shape (N, size).");
  }
  const read = {
    f8: (at) => bytes.getFloat64(at, true),
    f4: (at) => bytes.getFloat32(at, true),
    f2: (at) => half(bytes.getUint16(at, true)),
    i1: (at) => bytes.getInt8(at),
    u1: (at) => bytes.getUint8(at),
  }[type];
  const size = shape.at(-1);
  const step = Number(type[1]);
  if (start + size * step > buffer.byteLength) throw new Error("This .npy file is cut off.");
  return Array.from({ length: size }, (_, i) => read(start + i * step));
}

export function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    aa += a[i] ** 2;
    bb += b[i] ** 2;
  }
  return dot / Math.max(Math.sqrt(aa * bb), 1e-12);
}

/**
 * Change a vector as a defender might, before it is stored.
 * noise: its length as a share of the vector's; drop: share of numbers set to zero; bits: 0 for no rounding.
 * The seed makes the same defence the same every time.
 */
export function defend(vector, { noise, bits, drop, seed }) {
  const draw = generator(seed);
  const order = vector.map((_, i) => [draw(), i]).sort((a, b) => a[0] - b[0]);
  const dropped = new Set(order.slice(0, Math.round(drop * vector.length)).map(([, i]) => i));
  const scale = (noise * Math.hypot(...vector)) / Math.sqrt(vector.length);
  const noisy = vector.map((x, i) => {
    const gauss = Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
    return dropped.has(i) ? 0 : x + scale * gauss;
  });
  return bits ? round(noisy, bits) : noisy;
}

function round(vector, bits) {
  const largest = Math.max(...vector.map(Math.abs));
  if (bits === 1) return vector.map((x) => Math.sign(x) * largest);
  const levels = 2 ** (bits - 1) - 1;
  return vector.map((x) => (Math.round((x / largest) * levels) / levels) * largest);
}

/** Draw a vector as a strip, a colour a number; two rows where there is little room. */
export function draw(canvas, vector) {
  const style = getComputedStyle(document.documentElement);
  const [minus, zero, plus] = ["--blue", "--card", "--rust"].map((name) => rgb(style.getPropertyValue(name)));
  const rows = canvas.clientWidth < 500 ? 2 : 1;
  const columns = Math.ceil(vector.length / rows);
  canvas.width = columns;
  canvas.height = rows;
  const spread = Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0) / vector.length) || 1;
  const context = canvas.getContext("2d");
  vector.forEach((x, i) => {
    const strength = Math.min(Math.abs(x) / (2.2 * spread), 1);
    const end = x < 0 ? minus : plus;
    const mix = zero.map((from, k) => Math.round(from + (end[k] - from) * strength));
    context.fillStyle = `rgb(${mix})`;
    context.fillRect(i % columns, Math.floor(i / columns), 1, 1);
  });
}

function isNumbers(value) {
  return Array.isArray(value) && value.length > 1 && value.every((x) => typeof x === "number" && Number.isFinite(x));
}

function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
}

/** Mulberry32: small, seeded, good enough for noise. */
function generator(seed) {
  let state = (seed >>> 0) + 0x9e3779b9;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function rgb(hex) {
  const digits = hex.trim().slice(1);
  const full = digits.length === 3 ? [...digits].map((d) => d + d).join("") : digits;
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}
