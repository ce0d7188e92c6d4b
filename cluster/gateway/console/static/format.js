// Numbers as people read them.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return plain.format(value);
}

export function fixed(value, digits) {
  return value.toFixed(digits);
}

function scaled(value, units, base) {
  let step = 0;
  while (value >= base && step < units.length - 1) {
    value /= base;
    step += 1;
  }
  return `${step === 0 || value >= 100 ? plain.format(value) : value.toFixed(1)} ${units[step]}`;
}

export function bytes(value) {
  return scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
}

export function byteRate(value) {
  return value === null ? "–" : scaled(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
}

export function rate(value, unit) {
  if (value === null) return "–";
  if (value === 0) return unit ? `0 ${unit}` : "0";
  const number = value >= 100 ? plain.format(value) : value.toFixed(value >= 10 ? 0 : 1);
  return unit ? `${number} ${unit}` : number;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 100) return `${plain.format(value)} ms`;
  return `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function clock(epoch) {
  return new Date(epoch * 1000).toLocaleTimeString("en", { hour12: false });
}

export function words(name) {
  return name.replaceAll("_", " ");
}
