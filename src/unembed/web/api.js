// The server, seen from the page: three calls, and errors that are sentences.

let token = ""; // in memory only: gone when the page is closed

export function useToken(value) {
  token = value;
}

/** What the server, or the way to it, said no with; `status` is 0 when it could not be reached. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running?";

export async function models() {
  return (await (await call("api/models")).json()).models;
}

export async function encode(text, signal) {
  const answer = await call("api/encode", { texts: [text] }, signal);
  return (await answer.json()).encodings[0];
}

/** Recover a text from a vector. Yields {name, data} for each event; the last is "done". */
export async function* stream(body, signal) {
  const answer = await call("api/stream", body, signal);
  let finished = false;
  try {
    for await (const event of events(answer.body)) {
      if (event.name === "error") throw new ApiError(sentence(event.data.error), 500);
      finished = event.name === "done";
      yield event;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
  }
  if (!finished) throw new ApiError("The connection to the server broke off. What had come back by then is shown.", 0);
}

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const method = body ? "POST" : "GET";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE, 0);
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new ApiError(sentence(said.error ?? `The server answered ${answer.status}.`), answer.status);
}

/** Take server-sent events out of a stream of bytes, wherever the network cut it. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [name, data] = block.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      yield { name, data: JSON.parse(data) };
    }
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
