// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", {
  notation: "compact",
  compactDisplay: "long",
  maximumSignificantDigits: 3,
});
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

export const NONE = "–";

export function count(number) {
  return whole.format(number);
}

export function large(number) {
  return short.format(number);
}

// A share from 0 to 1 in percent, with two digits; 0 only for none at all.
export function share(number) {
  if (number === 0) return "0\u00a0%";
  const percent = 100 * number;
  if (percent >= 10) return `${percent.toFixed(0)}\u00a0%`;
  if (percent < 1e-4) return `${percent.toExponential(1)}\u00a0%`;
  return `${Number(percent.toPrecision(2))}\u00a0%`;
}

export function rate(number) {
  if (number === null) return NONE;
  return number < 10 ? String(Number(number.toFixed(1))) : count(number);
}

export function seconds(number) {
  if (number === null) return NONE;
  if (number < 1) return `${Number((1000 * number).toPrecision(3))}\u00a0ms`;
  return `${Number(number.toPrecision(3))}\u00a0s`;
}

export function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count(number) : number.toFixed(2)}\u00a0${units[unit]}`;
}

export function duration(total) {
  const minutes = Math.floor(total / 60);
  const hours = Math.floor(minutes / 60);
  const days = Math.floor(hours / 24);
  if (days > 0) return `${days}\u00a0d ${hours % 24}\u00a0h`;
  if (hours > 0) return `${hours}\u00a0h ${minutes % 60}\u00a0min`;
  return minutes > 0 ? `${minutes}\u00a0min` : `${Math.floor(total)}\u00a0s`;
}

// One scale, or the range of a list of one a head.
export function scale(value) {
  if (value === null) return NONE;
  if (!Array.isArray(value)) return plain.format(value);
  const low = plain.format(Math.min(...value));
  const high = plain.format(Math.max(...value));
  return `${low} to ${high} (${value.length} heads)`;
}
