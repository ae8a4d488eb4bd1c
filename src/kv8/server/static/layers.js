// What the rows of the layer table mean.

export const SIDES = ["k", "v"];

// Scales may still be missing while a server that measures them is loading.
export function isQuantized(layer) {
  return layer.dtype.startsWith("fp8");
}
