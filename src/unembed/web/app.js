// The story of the page: a sentence, its vector, the text thrown away, and back.

import { ApiError, encode, models, stream, useToken } from "./api.js";
import { Board, element } from "./board.js";
import { difference, tokenF1 } from "./compare.js";
import { Curve } from "./curve.js";
import { SAMPLES } from "./samples.js";
import { Settings } from "./settings.js";
import { curl, python } from "./snippets.js";
import { cosine, defend, draw, parse, parseNpy } from "./vector.js";

const $ = (id) => document.getElementById(id);
const PACE = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 140; // least milliseconds a step is seen
const LIKENESS = "the model’s own guess of the cosine; no encoder was asked";
const rest = (ms) => new Promise((done) => setTimeout(done, ms));

const state = {
  model: null, // what the server says of its model
  original: null, // {text, ids, vector} as embedded; text and ids are kept for the comparison only
  sent: null, // the vector that was last sent off
  boards: [],
  running: null, // AbortController of the run under way
};
const settings = new Settings($("settings"), $("defence"), (part) => {
  remember();
  // A defence is judged by what survives it, so show that at once.
  if (part === "defence" && state.original) run({ again: true });
});

// --- the sentence and the vector ------------------------------------------------------------------

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function showMode() {
  const vector = mode() === "vector";
  $("text-side").hidden = vector;
  $("vector-side").hidden = !vector;
  $("source-name").textContent = vector ? "A leaked vector" : "A sentence";
  const size = state.model ? `${state.model.embedding_size} ` : "";
  $("vector-name").textContent = vector ? `is nothing but ${size}numbers` : `becomes ${size}numbers`;
  $("run").textContent = vector ? "Recover the text" : "Throw it away and recover it";
}

function fillSamples() {
  const names = { easy: "everyday", personal: "personal", hard: "hard" };
  for (const [kind, texts] of Object.entries(SAMPLES)) {
    const row = element("div");
    for (const text of texts) {
      const button = element("button", "", text);
      button.type = "button";
      button.addEventListener("click", () => {
        write(text);
        run();
      });
      row.append(button);
    }
    $("samples").append(element("span", "kind", names[kind]), row);
  }
}

/** Give the sentence back its place. */
function write(text) {
  $("ghost").hidden = $("thrown").hidden = true;
  $("text").hidden = false;
  $("text").value = text;
}

/** Let the words fall, and leave a note that they are gone. */
async function throwAway(text) {
  const words = text.split(/(?<=\s)/);
  $("ghost").classList.remove("gone");
  $("ghost").replaceChildren(...words.map((word, i) => {
    const span = element("span", "", word);
    span.style.setProperty("--i", i);
    return span;
  }));
  $("text").hidden = true;
  $("ghost").hidden = $("thrown").hidden = false;
  if (PACE) await rest(250);
  $("ghost").classList.add("gone");
  if (PACE) await rest(750);
  $("ghost").replaceChildren(); // gone from the page, not only from sight
  $("text").value = "";
}

function showVector(vector) {
  draw($("strip"), vector);
  $("strip").setAttribute("aria-label", `The vector, ${vector.length} numbers, drawn as a strip of colours`);
  $("copy-vector").hidden = false;
  const treatment = settings.treatment;
  $("changed").hidden = !treatment;
  if (!treatment) return vector;
  const changed = defend(vector, { ...treatment, seed: settings.options().seed });
  draw($("changed-strip"), changed);
  $("changed-note").textContent = `What is stored instead, after the defence: cosine ${cosine(vector, changed).toFixed(3)} to the true vector.`;
  return changed;
}

// --- a run ----------------------------------------------------------------------------------------

/** Tell the whole story; `again` with the vector that is there already. */
async function run({ again = false } = {}) {
  state.running?.abort();
  const running = (state.running = new AbortController());
  complain("");
  $("run").textContent = "Stop";
  $("result").hidden = true;
  try {
    if (!again) await begin(running.signal);
    if (running.signal.aborted) return;
    state.sent = showVector(state.original.vector);
    await recover(running.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    complain(error.message);
    $("token-form").hidden = error.status !== 401;
    if (!(error instanceof ApiError) && !(error instanceof Refusal)) console.error(error);
  } finally {
    if (state.running === running) {
      state.running = null;
      state.boards.forEach((board) => board.finish());
      showMode();
    }
  }
}

/** What the visitor gave cannot be used. */
class Refusal extends Error {}

/** Get a vector: from the sentence, which is then thrown away, or from what was pasted. */
async function begin(signal) {
  if (mode() === "vector") {
    state.original = { text: null, ids: null, vector: readPasted() };
    return;
  }
  const text = $("text").value.trim() || state.original?.text;
  if (!text) throw new Refusal("Write a sentence first, or pick one of the samples.");
  const { text: cut, truncated, ids, vector } = await encode(text, signal);
  state.original = { text: cut, ids, vector };
  if (truncated) complain(`Only the first ${state.model.max_tokens} tokens fit into the model; the rest was cut.`);
  showVector(vector);
  if (!$("text").hidden) await throwAway(text);
}

function readPasted() {
  let vector;
  try {
    vector = parse($("pasted").value);
  } catch (error) {
    throw new Refusal(error.message);
  }
  const { embedding_size: size, encoder } = state.model;
  if (vector.length !== size) {
    throw new Refusal(`This vector has ${vector.length} numbers; ${encoder} makes ${size}. It must come from that encoder.`);
  }
  return vector;
}

/** Send the vector off, alone, and show what comes back. */
async function recover(signal) {
  const options = settings.options();
  const ways = [options.strategy, ...(settings.versus ? [settings.versus] : [])];
  $("boards").replaceChildren();
  $("scrub").hidden = true;
  state.boards = ways.map(
    (way) => new Board($("boards"), { title: ways.length > 1 ? way : "", length: state.model.max_tokens }),
  );
  say("Recovering the text from its vector.");
  if ($("boards").getBoundingClientRect().bottom > innerHeight) {
    $("vector-section").scrollIntoView({ block: "start", behavior: PACE ? "smooth" : "auto" });
  }
  const tries = ways.map((strategy, i) => follow({ ...options, strategy, vector: state.sent }, state.boards[i], signal));
  const ends = await Promise.allSettled(tries);
  showSlider();
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) throw failed.reason;
  showResult(ends.map((end) => end.value));
}

/** Show one stream on one board, no faster than the eye; returns how it ended. */
async function follow(body, board, signal) {
  let curve = null;
  for await (const { name, data } of stream(body, signal)) {
    if (name === "done") {
      board.title.textContent = data.strategy; // which one auto was
      return data;
    }
    if (name === "round") {
      curve ??= new Curve(board.root, data.total);
      curve.add(data);
      $("progress").textContent = `round ${data.index} of ${data.total}`;
      continue;
    }
    const changed = board.add(data);
    $("progress").textContent = `step ${data.index} of ${data.total}`;
    if (PACE && changed) await rest(PACE);
  }
}

function showSlider() {
  const count = Math.max(0, ...state.boards.map((board) => board.steps.length));
  $("scrub").hidden = count < 2;
  $("slider").max = $("slider").value = count;
  scrub();
}

function scrub() {
  const number = Number($("slider").value);
  $("slider-out").textContent = `${number} of ${$("slider").max}`;
  const texts = state.boards.map((board) => board.steps[Math.min(number, board.steps.length) - 1]?.text);
  $("slider").setAttribute("aria-valuetext", `step ${number}: ${texts.join(" / ")}`);
  if (!state.running) state.boards.forEach((board) => board.show(number));
}

function showResult(ends) {
  const { text, ids } = state.original;
  const columns = [];
  const known = text !== null;
  if (known) {
    // Differences of the original are those to the first strategy.
    columns.push(column("Original, kept by your browser only", marked(difference(text, ends[0].text)[0], "lost")));
  }
  const scores = [];
  for (const end of ends) {
    const title = ends.length > 1 ? `Recovered by ${end.strategy}` : "Recovered from the vector";
    const words = known ? marked(difference(text, end.text)[1], "new") : [end.text || "(nothing)"];
    const figures = element("dl", "figures");
    const f1 = known ? tokenF1(ids, end.ids) : null;
    if (end.cosine !== null) figures.append(figure(settings.treatment ? "cosine to what was stored" : "cosine", end.cosine.toFixed(3)));
    if (end.likeness !== null) figures.append(figure("likeness", end.likeness.toFixed(3), LIKENESS));
    if (known) figures.append(figure("token F1", f1.toFixed(2)));
    const made = column(title, words);
    made.append(figures, element("p", "quiet", effort(end)));
    columns.push(made);
    scores.push(`${title}: ${end.text}.` + (end.cosine !== null ? ` Cosine ${end.cosine.toFixed(2)}.` : "") + (known ? ` Token F1 ${f1.toFixed(2)}.` : ""));
  }
  $("pair").replaceChildren(...columns);
  $("legend").hidden = !known;
  $("result").hidden = false;
  $("progress").textContent = "";
  say(scores.join(" "));
}

function effort({ strategy, forward_passes: passes, encoder_calls: calls, seconds }) {
  return `${strategy}, ${passes} passes${calls ? `, ${calls} texts tried` : ""}, ${seconds.toFixed(1)} s`;
}

function column(title, content) {
  const made = element("div");
  const text = element("p");
  text.append(...content);
  made.append(element("h3", "", title), text);
  return made;
}

/** Words as they are to be shown; spaces stay outside of the marks. */
function marked(words, only) {
  return words.flatMap(({ word, fate }) => {
    if (fate === "same") return [word];
    return [word.startsWith(" ") ? " " : "", element("span", fate === "moved" ? "moved" : only, word.trim())];
  });
}

function figure(name, value, explanation = "") {
  const made = element("div");
  if (explanation) made.title = explanation;
  made.append(element("dt", "", name), element("dd", "", value));
  return made;
}

/** For those who see the page, when something is wrong. */
function complain(sentence) {
  $("alert").textContent = sentence;
  $("alert").hidden = !sentence;
}

/** For those who hear it. */
function say(sentence) {
  $("status").textContent = sentence;
}

// --- links, copies, files, theme ------------------------------------------------------------------

/** Keep the settings in the address. What follows # is never sent to a server. */
function remember() {
  const parameters = settings.toParameters().toString();
  history.replaceState(null, "", parameters ? `#${parameters}` : location.pathname);
}

const COPIES = {
  link: () => {
    const parameters = settings.toParameters();
    const text = state.original?.text ?? $("text").value.trim();
    if (text && mode() === "text") parameters.set("text", text);
    return `${location.origin}${location.pathname}#${parameters}`;
  },
  python: () => {
    const { text, vector } = state.original ?? {};
    const plain = text && !settings.treatment ? text : null;
    return python(settings.options(), { text: plain, vector: state.sent ?? vector, model: state.model.name });
  },
  curl: () => curl(settings.options(), { vector: state.sent, origin: location.origin }),
};

async function copy(what) {
  if (what !== "link" && !state.sent) return note("Recover something first.");
  await give(COPIES[what](), what === "link" ? "The link is copied; it holds the settings and the sentence." : "Copied.");
}

/** Put a text on the clipboard, or where it can be copied by hand. */
async function give(text, done) {
  $("snippet").value = text;
  $("snippet").hidden = false;
  try {
    await navigator.clipboard.writeText(text);
    note(done);
  } catch {
    $("snippet").select();
    note("Copy it from here.");
  }
}

function note(sentence) {
  $("copied").textContent = sentence;
}

async function take(file) {
  document.querySelector("input[name=mode][value=vector]").checked = true;
  showMode();
  try {
    const vector = file.name.endsWith(".npy") ? parseNpy(await file.arrayBuffer()) : parse(await file.text());
    $("pasted").value = JSON.stringify(vector);
  } catch (error) {
    complain(error.message);
    return;
  }
  run();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (state.original) showVector(state.original.vector);
}

function wire() {
  $("run").addEventListener("click", () => (state.running ? state.running.abort() : run()));
  $("edit").addEventListener("click", () => {
    write("");
    $("text").focus();
  });
  $("slider").addEventListener("input", scrub);
  $("copy-vector").addEventListener("click", () => {
    $("share-panel").open = true;
    give(JSON.stringify(state.original.vector), "The vector is copied.");
  });
  $("file").addEventListener("change", () => $("file").files[0] && take($("file").files[0]));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useToken($("token").value);
    $("token-form").hidden = true;
    complain("");
    start();
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", showMode);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
    if (event.key === "Escape") state.running?.abort();
  });
  for (const type of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(type, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", type === "dragover");
      if (type === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }
}

/** Learn what the server has, then do as the link says. */
async function start() {
  try {
    [state.model] = await models();
  } catch (error) {
    complain(error.message);
    $("token-form").hidden = error.status !== 401;
    return;
  }
  const { encoder, embedding_size: size, max_tokens: tokens, can_encode: canEncode } = state.model;
  $("model").textContent = `${encoder} · ${size} numbers · up to ${tokens} tokens`;
  settings.offer(state.model);
  showMode();
  const parameters = new URLSearchParams(location.hash.slice(1));
  settings.fromParameters(parameters);
  if (settings.treatment) $("defence-panel").open = true;
  new Board($("boards"), { title: "", length: tokens }).finish();
  if (!canEncode) {
    document.querySelector("input[name=mode][value=text]").disabled = true;
    document.querySelector("input[name=mode][value=vector]").checked = true;
    showMode();
    return;
  }
  const text = parameters.get("text");
  write(text ?? SAMPLES.easy[0]);
  if (text) run();
}

if (innerWidth < 900) $("settings-panel").open = false;
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
fillSamples();
wire();
start();
