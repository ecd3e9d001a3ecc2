// Numbers for people, and elements for what they stand in.

const decimals = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// Microseconds.
function duration(time) {
  if (Math.abs(time) >= 1e6) return `${decimals(time / 1e6, 2)} s`;
  if (Math.abs(time) >= 1e3) return `${decimals(time / 1e3, Math.abs(time) < 1e5 ? 2 : 1)} ms`;
  return `${decimals(time, time && Math.abs(time) < 10 ? 1 : 0)} µs`;
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(bytes) < 1024) return `${Number(bytes.toPrecision(4))} ${unit}`;
    bytes /= 1024;
  }
  return `${decimals(bytes, 2)} GiB`;
}

const count = (value) => decimals(value, 0);

const percent = (part) => `${decimals(100 * part, 1)} %`;

// What is added to `before`, with a sign; for any of the units above.
function difference(format, before, after) {
  if (before === after) return "same";
  const sign = after > before ? "+" : "−";
  const relative = before ? ` (${sign}${percent(Math.abs(after / before - 1))})` : "";
  return `${sign}${format(Math.abs(after - before))}${relative}`;
}

// The innermost module that has all of these parameters, and their names in it.
function inModule(names) {
  const paths = names.map((name) => name.split("."));
  let depth = 0;
  while (paths.every((path) => depth < path.length - 1 && path[depth] === paths[0][depth])) depth += 1;
  return [paths[0].slice(0, depth).join("."), paths.map((path) => path.slice(depth).join("."))];
}

// An element. Names of parameters and settings are text: they are never read as HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
