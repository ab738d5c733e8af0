// The two forms of settings, what their sliders say, and the link that carries them.

const BITS = [0, 8, 6, 5, 4, 3, 2, 1];
const percent = (x) => `${Math.round(x * 100)} %`;

const WORDS = {
  steps: (x) => (x ? String(x) : "the strategy’s own"),
  guidance: (x) => (x === 1 ? "1 (plain)" : String(x)),
  temperature: (x) => (x < 0 ? "the strategy’s own" : x.toFixed(1)),
  rounds: (x) => (x ? `${x} rounds` : "off"),
  noise: (x) => (x ? `${percent(x)} of its length` : "none"),
  bits: (x) => (BITS[x] ? `${BITS[x]} bit${BITS[x] > 1 ? "s" : ""}` : "none"),
  drop: (x) => (x ? percent(x) : "none"),
};

export class Settings {
  /** Wire the forms; `changed(part)` is called with "decoding" or "defence" when a value has been set. */
  constructor(decoding, defence, changed) {
    this.decoding = decoding;
    this.defence = defence;
    for (const [name, form] of Object.entries({ decoding, defence })) {
      form.addEventListener("input", () => this.describe());
      form.addEventListener("change", () => changed(name));
      form.addEventListener("submit", (event) => event.preventDefault());
      // The values are reset after the event, so ask a moment later.
      form.addEventListener("reset", () => setTimeout(() => (this.describe(), changed(name))));
    }
    this.describe();
  }

  /** Offer what the model can do. */
  offer(model) {
    const { strategy, versus, steps, rounds } = this.decoding.elements;
    for (const { name, summary } of model.strategies) {
      for (const select of [strategy, versus]) {
        const option = new Option(name, name);
        option.title = summary;
        select.add(option);
      }
    }
    steps.max = model.max_tokens;
    rounds.max = Math.min(10, model.limits.rounds);
    rounds.closest("label").hidden = !model.can_encode;
    this.describe();
  }

  /** Write beside each slider what it stands at. */
  describe() {
    for (const form of [this.decoding, this.defence]) {
      for (const input of form.querySelectorAll("input[type=range]")) {
        const words = WORDS[input.name](Number(input.value));
        input.closest("label").querySelector(".value").textContent = words;
        input.setAttribute("aria-valuetext", words);
      }
    }
  }

  /** What /api/stream is asked for. */
  options() {
    const { strategy, steps, guidance, temperature, seed, rounds } = this.decoding.elements;
    const heat = Number(temperature.value);
    const options = {
      strategy: strategy.value,
      steps: Number(steps.value) || null,
      guidance: Number(guidance.value),
      temperature: heat < 0 ? null : heat,
      seed: Math.max(0, Math.trunc(Number(seed.value) || 0)),
    };
    return Number(rounds.value) ? { ...options, rounds: Number(rounds.value) } : options;
  }

  get versus() {
    return this.decoding.elements.versus.value;
  }

  /** What happens to the vector first; null if nothing does. */
  get treatment() {
    const { noise, bits, drop } = this.defence.elements;
    const treatment = { noise: Number(noise.value), bits: BITS[Number(bits.value)], drop: Number(drop.value) };
    return Object.values(treatment).some(Boolean) ? treatment : null;
  }

  /** Everything that is not as it was at first, for a link. */
  toParameters() {
    const pairs = [];
    for (const form of [this.decoding, this.defence]) {
      for (const field of form.elements) {
        const first = field instanceof HTMLSelectElement ? field.options[0].value : field.defaultValue;
        if (field.name && field.value !== first) pairs.push([field.name, field.value]);
      }
    }
    return new URLSearchParams(pairs);
  }

  fromParameters(parameters) {
    for (const form of [this.decoding, this.defence]) {
      for (const field of form.elements) {
        const value = parameters.get(field.name);
        const known = !(field instanceof HTMLSelectElement) || [...field.options].some((o) => o.value === value);
        if (field.name && value !== null && known) field.value = value;
      }
    }
    this.describe();
  }
}
