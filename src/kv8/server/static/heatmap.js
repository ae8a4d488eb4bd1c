// The layers × (K, V) map: one cell a side, coloured by the share of values clipped.

import { element } from "./dom.js";
import { isQuantized, SIDES } from "./layers.js";
import { describe, showReadout } from "./readout.js";

// Upper bounds of the colours; 0 has one of its own, and so has everything beyond the last.
const BOUNDS = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1];
const LEVELS = ["0", "≤ 0.001 %", "≤ 0.01 %", "≤ 0.1 %", "≤ 1 %", "≤ 10 %", "> 10 %"];
// Explained only where there are any.
const RARE = [
  ["misfit", "more than its scale should clip"],
  ["native", "not quantized"],
  ["reader", "reads another layer's"],
  ["empty", "nothing stored"],
];
const CELL = 30; // least pixels a column needs

export class HeatMap {
  #root;
  #readout;
  #rare;
  #cells = [];
  #layers = [];
  #misfits = new Map();
  #columns = 0;
  #chosen = null; // what a person focused or tapped last, [layer index, side]
  #pointed = null;

  constructor(root, readout, legend) {
    this.#root = root;
    this.#readout = readout;
    LEVELS.forEach((text, level) => legend.append(legendItem(String(level), text)));
    this.#rare = RARE.map(([level, text]) => legendItem(level, text));
    legend.append(...this.#rare);
    root.addEventListener("keydown", (event) => this.#move(event));
    root.addEventListener("focusin", (event) => this.#choose(event.target));
    root.addEventListener("click", (event) => this.#choose(event.target));
    root.addEventListener("pointerover", (event) => this.#point(event.target));
    root.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.#layOut()).observe(root);
  }

  update(data) {
    const before = this.#layers.length;
    this.#layers = data.layers;
    this.#misfits = new Map();
    for (const found of data.misfits) {
      const key = `${found.layer} ${found.side}`;
      this.#misfits.set(key, [...(this.#misfits.get(key) ?? []), found]);
    }
    if (before !== data.layers.length) {
      this.#columns = 0;
      this.#chosen = null;
    }
    this.#layOut();
    this.#paint();
  }

  // Cut the layers into bands of equal length that fit the width.
  #layOut() {
    if (this.#layers.length === 0) return;
    const fitting = Math.max(1, Math.floor((this.#root.clientWidth - 28) / CELL));
    const bands = Math.ceil(this.#layers.length / fitting);
    const columns = Math.ceil(this.#layers.length / bands);
    if (columns === this.#columns) return;
    this.#columns = columns;
    const focused = this.#root.contains(document.activeElement);
    this.#cells = this.#layers.map(() => ({}));
    this.#root.replaceChildren();
    for (let start = 0; start < this.#layers.length; start += columns) {
      this.#root.append(this.#band(start, Math.min(start + columns, this.#layers.length)));
    }
    this.#paint();
    if (focused) this.#cell(this.#current())?.focus();
  }

  #band(start, stop) {
    const numbers = this.#layers.slice(start, stop).map((layer) => layer.layer);
    const table = element("table", { role: "grid" });
    table.setAttribute("aria-label", `Layers ${numbers[0]} to ${numbers.at(-1)}`);
    const head = element("tr", {}, element("td"));
    head.append(...numbers.map((number) => element("th", { scope: "col" }, String(number))));
    const rows = SIDES.map((side) => {
      const row = element("tr", {}, element("th", { scope: "row" }, side.toUpperCase()));
      for (let index = start; index < stop; index += 1) {
        const cell = element("td", { role: "gridcell", tabindex: "-1" });
        cell.dataset.index = index;
        cell.dataset.side = side;
        this.#cells[index][side] = cell;
        row.append(cell);
      }
      return row;
    });
    table.style.setProperty("--columns", numbers.length);
    table.style.setProperty("--of", this.#columns);
    table.append(element("thead", {}, head), element("tbody", {}, ...rows));
    return table;
  }

  #paint() {
    this.#layers.forEach((layer, index) => {
      for (const side of SIDES) {
        const cell = this.#cells[index][side];
        cell.dataset.level = level(layer, side);
        cell.toggleAttribute("data-misfit", this.#misfits.has(`${layer.layer} ${side}`));
        cell.setAttribute("aria-label", describe(layer, side));
      }
    });
    for (const item of this.#rare) {
      const { level } = item.firstChild.dataset;
      const found = level === "misfit" ? "[data-misfit]" : `[data-level="${level}"]`;
      item.hidden = this.#root.querySelector(found) === null;
    }
    this.#show();
  }

  // The cell a keyboard starts at: the one chosen, else the one that clips most.
  #current() {
    if (this.#chosen !== null) return this.#chosen;
    let worst = [0, "k"];
    let most = -1;
    this.#layers.forEach((layer, index) => {
      for (const side of SIDES) {
        if ((layer[side].saturated_share ?? -1) > most) {
          most = layer[side].saturated_share;
          worst = [index, side];
        }
      }
    });
    return worst;
  }

  #cell([index, side]) {
    return this.#cells[index]?.[side];
  }

  #choose(target) {
    const cell = target.closest("[data-index]");
    if (cell === null) return;
    this.#chosen = [Number(cell.dataset.index), cell.dataset.side];
    this.#pointed = null;
    this.#show();
  }

  #point(target) {
    const cell = target?.closest("[data-index]");
    this.#pointed = cell ? [Number(cell.dataset.index), cell.dataset.side] : null;
    this.#show();
  }

  #move(event) {
    const [index, side] = this.#current();
    const last = this.#layers.length - 1;
    const step = this.#columns;
    const to = {
      ArrowLeft: [Math.max(0, index - 1), side],
      ArrowRight: [Math.min(last, index + 1), side],
      ArrowUp: side === "v" ? [index, "k"] : [index - step, "v"],
      ArrowDown: side === "k" ? [index, "v"] : [index + step, "k"],
      Home: [0, side],
      End: [last, side],
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#cell(to)?.focus();
  }

  #show() {
    const [index, side] = this.#pointed ?? this.#current();
    const layer = this.#layers[index];
    if (layer === undefined) return;
    for (const cell of this.#root.querySelectorAll("[data-index]")) {
      const here = cell === this.#cell([index, side]);
      cell.toggleAttribute("data-shown", here);
      cell.tabIndex = cell === this.#cell(this.#current()) ? 0 : -1;
    }
    showReadout(this.#readout, layer, side, this.#misfits.get(`${layer.layer} ${side}`) ?? []);
  }
}

function level(layer, side) {
  const seen = layer[side];
  if (layer.reads_layer !== null) return "reader";
  if (!isQuantized(layer)) return "native";
  if (!seen.stored) return "empty";
  if (seen.saturated === 0) return "0";
  const found = BOUNDS.findIndex((bound) => seen.saturated_share <= bound);
  return String(found === -1 ? BOUNDS.length + 1 : found + 1);
}

function legendItem(level, text) {
  const swatch = element("span", { class: "swatch" });
  swatch.dataset.level = level;
  return element("li", {}, swatch, text);
}
