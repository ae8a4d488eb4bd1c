// What one cell of the map stands for, in words.

import { element, fillFacts } from "./dom.js";
import * as format from "./format.js";
import { isQuantized } from "./layers.js";

export function showReadout(target, layer, side, misfits) {
  const title = element("h3", {}, `Layer ${layer.layer} `);
  title.append(element("span", { class: "side" }, side === "k" ? "K keys" : "V values"));
  const facts = element("dl", { class: "facts" });
  fillFacts(facts, details(layer, side));
  const verdicts = misfits.map((found) => {
    const verdict = element("p", { class: "verdict" }, misfitText(found));
    verdict.dataset.verdict = "bad";
    return verdict;
  });
  target.replaceChildren(title, facts, ...verdicts);
}

function details(layer, side) {
  const seen = layer[side];
  const facts = [];
  if (layer.reads_layer !== null) facts.push(["reads", `layer ${layer.reads_layer}`]);
  if (seen.scale !== null) {
    facts.push(["scale", format.scale(seen.scale)], ["origin", seen.origin]);
  } else if (layer.reads_layer === null) {
    facts.push(["scale", isQuantized(layer) ? "not measured yet" : noScale(layer)]);
  }
  if (seen.stored !== undefined) {
    facts.push(
      ["clipped", amount(seen.saturated, seen.saturated_share)],
      ["became zero", amount(seen.underflowed, seen.underflowed_share)],
      ["stored", format.count(seen.stored)],
    );
    if (seen.not_a_number > 0) facts.push(["not a number", format.count(seen.not_a_number)]);
  }
  facts.push(["format", layer.dtype], ["type", layer.type]);
  return facts;
}

function noScale(layer) {
  return layer.skipped ? `none: skipped by ${layer.skipped_by}` : "none";
}

export function describe(layer, side) {
  const facts = details(layer, side).map(([name, value]) => `${name} ${value}`);
  return `Layer ${layer.layer}, ${side === "k" ? "keys" : "values"}: ${facts.join(", ")}`;
}

function amount(number, share) {
  return number === 0 ? "0" : `${format.share(share)} (${format.count(number)})`;
}

function misfitText(found) {
  return found.kind === "saturated"
    ? `Clips ${format.share(found.share)}: more than this scale should. Calibrate, or skip the layer.`
    : `Stores ${format.share(found.share)} as zero: this scale is too large for the values.`;
}
