// The board on which tokens unmask: one for each strategy. All text goes in as textContent.

export class Board {
  /** An empty board of `length` masks, with a heading when there are two. */
  constructor(parent, { title, length }) {
    this.steps = [];
    this.root = element("div", "board busy");
    this.title = element("h3", "", title);
    if (title) this.root.append(this.title);
    this.tokens = element("div", "tokens");
    this.root.append(this.tokens);
    parent.append(this.root);
    this.#paint({ pieces: new Array(length).fill(null), confidences: [] }, null);
  }

  /** Keep a step, and show it; returns whether it changed anything. */
  add(step) {
    const before = this.steps.at(-1);
    this.steps.push(step);
    this.show(this.steps.length);
    return String(before?.ids) !== String(step.ids);
  }

  /** Show a step, counted from 1; beyond the last, the last. */
  show(number) {
    const index = Math.min(number, this.steps.length) - 1;
    if (index >= 0) this.#paint(this.steps[index], this.steps[index - 1]);
  }

  /** Nothing more will come. */
  finish() {
    this.root.classList.remove("busy");
  }

  #paint(step, before) {
    this.tokens.replaceChildren();
    let previous = null;
    step.pieces.forEach((piece, i) => {
      if (piece === "") return; // the end, and what follows it
      const token = element("span", piece === null ? "mask" : "word");
      token.style.setProperty("--i", i);
      if (piece !== null) {
        const sure = step.confidences[i] ?? 0;
        token.textContent = piece.trimStart();
        token.style.setProperty("--sure", sure.toFixed(3));
        token.title = `confidence ${Math.round(sure * 100)} %`;
        if (before && before.pieces[i] !== piece) token.classList.add("fresh");
        if (previous && !piece.startsWith(" ")) {
          token.classList.add("joined");
          previous.classList.add("joins");
        }
      }
      previous = piece === null ? null : token;
      this.tokens.append(token);
    });
  }
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}
