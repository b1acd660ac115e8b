"use strict";
// The page's curves. Whatever a run wrote enters as text nodes, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const make = (tag, className, ...content) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
};
const short = (value) => plain(value).replace("-", "−");
const plain = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
};
const clock = (seconds) => {
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  if (h) return `${h}:${String(m).padStart(2, "0")} h`;
  return m ? `${m}:${String(s % 60).padStart(2, "0")} min` : `${s} s`;
};
const svg = (tag, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const colour = (element, i) => (element.style.setProperty("--c", `var(--s${i % 8})`), element);

// Round steps of 1, 2 or 5 (for time: of whole minutes and hours) that span low..high.
function ticks(low, high, count, bases = [1, 2, 5, 10]) {
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
  const step = size * bases.find((b) => b * size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9), found = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function clockTicks(high) {
  const sizes = [1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = sizes.find((s) => high / s <= 6) ?? 86400 * Math.ceil(high / 86400 / 6);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

const charts = [];
let axis = "x";

function chart(panel, first) {
  const figure = make("figure", first ? "panel first" : "panel");
  const title = make("h3", "", panel.title);
  if (panel.unit) title.append(make("span", "unit", panel.unit));
  const keys = make("div", "keys"), values = [];
  panel.series.forEach((series, i) => {
    const mark = colour(make("i", panel.bands ? "band" : ""), i), value = make("b");
    keys.append(make("span", "", mark, series.label && `${series.label} `, value));
    values.push(value);
  });
  panel.guides.forEach((guide, i) => {
    const mark = colour(make("i", "guide"), panel.series.length + i);
    keys.append(make("span", "", mark, `${guide.name} `, make("b", "", short(guide.y))));
  });
  const picture = svg("svg", { role: "img" });
  figure.append(title, keys, picture);
  const last = (series) => series.y.findLast((v) => v !== null);
  picture.setAttribute("aria-label", `${panel.title}: ` +
    panel.series.map((s) => `${s.name} ends at ${short(last(s))}`).join(", "));
  const self = { panel, figure, picture, values, first, cross: null };
  self.draw = () => draw(self);
  charts.push(self);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = self.toX?.((event.clientX - box.left) * (self.width / box.width));
    if (at !== undefined) for (const other of charts) point(other, at);
  });
  picture.addEventListener("pointerleave", () => charts.forEach((c) => point(c, null)));
  // Also when a folded panel opens, and when the window or the paper changes.
  new ResizeObserver(() => figure.clientWidth !== self.width && self.draw()).observe(figure);
  return self;
}

function draw(self) {
  const { panel, picture, first } = self;
  const width = self.figure.clientWidth;
  if (!width) return;
  const height = first ? 230 : 150;
  const left = 44, right = 8, top = 8, bottom = 22;
  const series = panel.series.map((s) => ({ ...s, x: s[axis] }));
  // Bands stand on each other; what was not measured counts as none.
  let tops = series.map((s) => s.y);
  if (panel.bands) {
    tops = [];
    series.forEach((s, i) => tops.push(s.y.map((v, j) => (v ?? 0) + (i ? tops[i - 1][j] : 0))));
  }
  const xs = charts.xs[axis], known = tops.flat().filter((v) => v !== null);
  known.push(...panel.guides.map((g) => g.y));
  let low = Math.min(...known), high = Math.max(...known);
  // From 0 where that does not flatten the curve.
  if (low > 0 && (panel.bands || low < 0.6 * high)) low = 0;
  if (low >= 0 && high <= 1 && high > 0.45 && low < 0.5) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const marks = ticks(low, high, first ? 5 : 3);
  const x0 = xs.low, x1 = xs.high > xs.low ? xs.high : xs.low + 1;
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
  picture.replaceChildren();
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("height", height);
  for (const y of marks) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }),
      svg("text", { x: left - 6, y: Y(y) + 4, "text-anchor": "end" }, short(y)));
  }
  const count = Math.max(2, Math.min(8, Math.floor(width / 90)));
  const across = axis === "t" ? clockTicks(x1) : ticks(x0, x1, count).filter(Number.isInteger);
  for (const x of across) picture.append(svg("text",
    { x: X(x), y: height - 5, "text-anchor": X(x) > width - 20 ? "end" : "middle" },
    axis === "t" ? clock(x) : short(x)));
  const path = (s, y) => {
    let text = "", pen = "M";
    y.forEach((value, j) => {
      if (value === null || s.x[j] === null) { pen = "M"; return; }
      text += `${pen}${X(s.x[j]).toFixed(1)},${Y(value).toFixed(1)}`;
      pen = "L";
    });
    return text;
  };
  panel.guides.forEach((guide, i) => picture.append(colour(svg("line",
    { class: "guide", x1: left, x2: width - right, y1: Y(guide.y), y2: Y(guide.y) }),
    panel.series.length + i)));
  series.forEach((s, i) => {
    if (panel.bands) {
      const under = i ? tops[i - 1] : s.y.map(() => 0);
      const back = s.x.map((x, j) => [x, under[j]]).reverse()
        .map(([x, y]) => `L${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
      picture.append(colour(svg("path", { class: "area", d: path(s, tops[i]) + back + "Z" }), i));
      return;
    }
    if (s.smooth) picture.append(colour(svg("path", { class: "raw", d: path(s, s.y) }), i));
    picture.append(colour(svg("path", { class: "curve", d: path(s, s.smooth ?? s.y) }), i));
    if (s.y.length <= 30) s.y.forEach((y, j) => y !== null && s.x[j] !== null &&
      picture.append(colour(svg("circle", { class: "dot", r: 2.6, cx: X(s.x[j]), cy: Y(y) }), i)));
  });
  self.cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(self.cross);
  Object.assign(self, { width, X, toX: (px) => x0 + ((px - left) / (width - left - right)) * (x1 - x0) });
  point(self, null);
}

// The numbers of one moment in all panels at once; null: the newest.
function point(self, at) {
  if (!self.cross) return;
  let where = null;
  self.panel.series.forEach((series, i) => {
    const x = series[axis];
    let best = null;
    x.forEach((value, j) => {
      if (value === null || (at === null && series.y[j] === null)) return;
      if (best === null || (at === null ? j > best : Math.abs(value - at) < Math.abs(x[best] - at))) best = j;
    });
    self.values[i].textContent = best === null ? "–" : short(series.y[best]);
    if (best !== null && at !== null && (where === null || Math.abs(x[best] - at) < Math.abs(where - at))) where = x[best];
  });
  self.cross.setAttribute("visibility", where === null ? "hidden" : "visible");
  if (where === null) return;
  for (const end of ["x1", "x2"]) self.cross.setAttribute(end, self.X(where));
  if (self.stamp) self.stamp.remove();
  self.stamp = svg("text", { class: "stamp", x: self.X(where) + 4, y: 16 }, axis === "t" ? clock(where) : `step ${where}`);
  if (self.X(where) > self.width - 60) {
    self.stamp.setAttribute("text-anchor", "end");
    self.stamp.setAttribute("x", self.X(where) - 4);
  }
  self.cross.after(self.stamp);
}

function span(name) {
  const all = data.panels.flatMap((p) => p.series.flatMap((s) => s[name])).filter((v) => v !== null);
  return { low: name === "t" ? 0 : Math.min(...all), high: Math.max(...all) };
}

if (data.panels.length) {
  by("curves").hidden = false;
  charts.xs = { x: span("x"), t: span("t") };
  // Against time only where it never runs backwards, as over a resume it may.
  by("axis").hidden = !data.panels.every((p) => p.series.every((s) =>
    s.t.every((t, i) => t !== null && (i === 0 || t >= s.t[i - 1]))));
  data.panels.forEach((panel) => {
    const made = chart(panel, panel === data.panels[0]);
    by(panel.more ? "more-panels" : "panels").append(made.figure);
    if (panel.more) by("more").hidden = false;
    made.draw();
  });
  by("axis").addEventListener("change", (event) => {
    axis = event.target.value;
    charts.forEach((c) => c.draw());
  });
}
