// Figures as people read them.

export function ms(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size < 9.95) return `${value.toFixed(1)} ms`;
  if (size < 999.5) return `${Math.round(value)} ms`;
  if (size < 9_995) return `${(value / 1000).toFixed(2)} s`;
  if (size < 99_950) return `${(value / 1000).toFixed(1)} s`;
  return `${Math.round(value / 1000)} s`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return `${Math.round(value)}`;
  if (value < 999_500) return `${(value / 1000).toFixed(value < 99_500 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

export function gigabytes(bytes) {
  return bytes === null || bytes === undefined ? "–" : `${(bytes / 1e9).toFixed(2)} GB`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// An element with children: text as text, nothing as markup.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
