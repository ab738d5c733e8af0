// The best cosine over the rounds of a search, drawn while they come.

import { element } from "./board.js";

const SVG = "http://www.w3.org/2000/svg";

export class Curve {
  /** Room for `rounds` rounds after the drafts, which are round 0. */
  constructor(parent, rounds) {
    this.rounds = rounds;
    this.values = [];
    this.root = element("figure", "curve");
    this.graph = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" });
    this.line = svg("polyline");
    this.graph.append(this.line);
    this.caption = element("figcaption", "quiet");
    this.root.append(this.graph, this.caption);
    parent.append(this.root);
  }

  /** Take the standing after a round. */
  add({ index, cosine, text, encoder_calls: calls, exact }) {
    this.values.push(cosine);
    const low = Math.min(...this.values) - 0.005;
    const high = Math.max(...this.values) + 0.005;
    const points = this.values.map((value, i) => {
      const x = (100 * i) / Math.max(this.rounds, 1);
      return `${x.toFixed(2)},${(29 - (28 * (value - low)) / (high - low)).toFixed(2)}`;
    });
    this.line.setAttribute("points", points.join(" "));
    const found = exact ? ", exact" : "";
    const words = `round ${index} of ${this.rounds}: best cosine ${cosine.toFixed(3)}${found}, ${calls} texts tried`;
    this.graph.setAttribute("aria-label", `Search, ${words}`);
    this.caption.textContent = `${words}: ${text}`;
  }
}

function svg(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
