// Everything on the page but the map, from one document of /v1/kv_cache.

import * as format from "./format.js";
import { byId, element, fillFacts, setText } from "./dom.js";
import { isQuantized } from "./layers.js";

export function showHeader(data) {
  setText("model", data.model);
  showState(data.state);
  setText("meta", `kv8 ${data.version}, up ${format.duration(data.uptime_seconds)}`);
  const usage = data.state === "ready" ? format.share(data.use.usage) : data.state;
  document.title = `${usage} · ${data.model} · kv8`;
}

export function showState(state) {
  byId("state").dataset.state = state;
  setText("state", state);
}

export function showUse({ use }) {
  const { used, cached, free } = use.blocks;
  const total = used + cached + free;
  setText("usage", format.share(use.usage));
  setText("blocks", `of ${format.count(total)} blocks`);
  for (const name of ["used", "cached", "free"]) setText(name, format.count(use.blocks[name]));
  const bar = byId("bar");
  for (const name of ["used", "cached"]) {
    bar.querySelector(`.${name}`).style.setProperty("--share", total ? use.blocks[name] / total : 0);
  }
  bar.setAttribute(
    "aria-label",
    `${format.count(used)} blocks used, ${format.count(cached)} cached, ${format.count(free)} free`,
  );
}

export function showSpeed(rates) {
  setText("speed", format.rate(rates.now("generated")));
  const trace = rates.trace();
  const peak = Math.max(0, ...trace.map((point) => point.value));
  const svg = byId("trace");
  const line = peak > 0 ? path(trace, peak) : "";
  svg.querySelector(".line").setAttribute("d", line);
  svg.querySelector(".area").setAttribute("d", line && `${line} L100 24 L${startOf(trace)} 24 Z`);
  const note = peak > 0 ? `peak ${format.rate(peak)} in the last 2 min` : "nothing generated lately";
  setText("trace-note", rates.span === 0 ? "measuring" : note);
  svg.setAttribute("aria-label", `Tokens generated a second: ${byId("trace-note").textContent}`);
}

// The newest sample stands at the right edge, one of two minutes ago at the left.
function x(trace, point) {
  return 100 - (100 * (trace.at(-1).at - point.at)) / 120;
}

function startOf(trace) {
  return x(trace, trace[0]).toFixed(1);
}

function path(trace, peak) {
  const points = trace.map(
    (point) => `${x(trace, point).toFixed(1)} ${(23 - (22 * point.value) / peak).toFixed(1)}`,
  );
  return `M${points.join(" L")}`;
}

export function showClipped(data) {
  const layers = data.layers.filter((layer) => isQuantized(layer) && layer.reads_layer === null);
  const quantized = layers.flatMap((layer) => [layer.k, layer.v]);
  const sum = (name) => quantized.reduce((total, side) => total + (side[name] ?? 0), 0);
  const stored = sum("stored");
  setText("clipped", stored > 0 ? format.share(sum("saturated") / stored) : format.NONE);
  setText("clipped-of", stored > 0 ? `${format.large(stored)} values stored` : "");
  const verdict = byId("verdict");
  const [kind, text] = judge(data, quantized.length, stored);
  verdict.dataset.verdict = kind;
  setText("verdict", text);
  byId("empty").hidden = data.state !== "ready" || data.counters.steps > 0;
}

function judge(data, quantized, stored) {
  if (quantized === 0) return ["none", "The cache keeps the model's own dtype: nothing is clipped."];
  if (stored === 0) return ["none", "Nothing is stored yet."];
  const clips = data.misfits.filter((found) => found.kind === "saturated").length;
  const lost = data.misfits.length - clips;
  const all = `${quantized} K and V caches`;
  if (clips > 0) return ["bad", `${clips} of ${all} clip more than their scale should.`];
  if (lost > 0) return ["bad", `${lost} of ${all} store most values as zero.`];
  return ["good", `None of ${all} clips more than its scale should.`];
}

export function showWork(data, rates) {
  const first = rates.mean("first");
  const next = rates.mean("next");
  const prefix = data.counters.prefix_cache;
  const since = (mean) => (mean && !mean.recent ? " since start" : "");
  fillFacts(byId("work"), [
    ["running", format.count(data.use.running)],
    ["waiting", format.count(data.use.waiting)],
    ["prompt tokens/s", format.rate(rates.now("prompt"))],
    ["first token after", format.seconds(first && first.value) + since(first)],
    ["each next token", format.seconds(next && next.value) + since(next)],
    [
      "prefix found",
      prefix.query_tokens ? format.share(prefix.hit_tokens / prefix.query_tokens) : format.NONE,
    ],
    ["preemptions", format.count(data.counters.preemptions)],
    ["failed requests", format.count(data.counters.finished.error ?? 0)],
  ]);
}

export function showCache(data) {
  const dtypes = new Map();
  for (const { dtype } of data.layers) dtypes.set(dtype, (dtypes.get(dtype) ?? 0) + 1);
  const layers = [...dtypes].map(
    ([dtype, number]) => `${dtype} in ${number} ${number === 1 ? "layer" : "layers"}`,
  );
  fillFacts(byId("cache"), [
    ["stored as", layers.join(", ")],
    ["bytes a token", format.count(data.bytes_per_token)],
    ["holds", `${format.count(data.tokens)} tokens`],
    ["memory", format.bytes(data.memory_bytes)],
    ["longest request", `${format.count(data.max_model_len)} tokens`],
    ["such requests at once", data.max_concurrency.toFixed(2)],
    ["blocks", `${format.count(data.num_blocks)} of ${data.block_size} tokens`],
    ["scales", scalesText(data)],
  ]);
}

function scalesText(data) {
  if (data.calibrated === null) return "none needed";
  if (data.stale) return "stale: the weights have changed";
  return data.calibrated ? "calibrated" : "not all calibrated";
}

export function showSettings(data) {
  const settings = byId("settings");
  const shown = JSON.stringify([data.settings, data.messages, data.warnings]);
  if (settings.dataset.shown === shown) return;
  settings.dataset.shown = shown;
  settings.replaceChildren(
    ...Object.entries(data.settings).map(([name, { value, reason }]) =>
      element(
        "div",
        {},
        element("dt", {}, name),
        element("dd", {}, element("b", {}, value), element("span", {}, reason)),
      ),
    ),
  );
  for (const id of ["messages", "warnings"]) {
    byId(id).replaceChildren(...data[id].map((text) => element("li", {}, text)));
  }
}

export function showExample(data) {
  const url = new URL("v1/completions", document.baseURI);
  const body = JSON.stringify({ model: data.model, prompt: "London is the capital of" });
  setText("example", `curl ${url} -H 'Content-Type: application/json' -d '${body}'`);
}
