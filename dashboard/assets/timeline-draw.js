"use strict";
// How the time line is drawn: colours and patterns, the lanes, the ruler, the strip of the whole recording. Knows nothing of input.
window.gpudiagDraw = (() => {
  const ROW = 18, TITLE = 20, GAP = 6, STRIP = 26, RULER = 22;
  const HEAD = STRIP + RULER;
  const FONT = '12px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
  // style -> [variable of its colour (report.css), pattern]: what differs in colour only by little differs in pattern
  const STYLES = {
    compute: ["--compute", ""], memory: ["--memory", "dots"], overhead: ["--overhead", "vertical"],
    communication: ["--communication", "diagonal"], copy: ["--copy", "back"], unknown: ["--unknown", ""],
    idle_data: ["--idle-data", "back"], idle_launch: ["--idle", "diagonal"], idle_sync: ["--idle-sync", "horizontal"],
    idle_dependency: ["--idle-order", "back"], idle_allocation: ["--idle-stall", "vertical"], idle_compile: ["--idle-stall", "diagonal"],
    idle_gc: ["--idle-host", "dots"], idle_io: ["--idle-host", "vertical"], idle_profiler: ["--unknown", "vertical"],
    idle_unexplained: ["--unknown", "dots"], idle_init: ["--idle-host", "horizontal"], outside_recording: ["--unknown", "diagonal"],
    step: ["--quiet", ""], step_left_out: ["--line", "diagonal"], op: ["--timeline-op", ""], call: ["--timeline-call", ""],
    wait: ["--idle-sync", "horizontal"], mark: ["--timeline-mark", ""], frame: ["--timeline-frame", ""],
  };

  function units(ns) {
    // as gpudiag.units.format_ns
    const names = ["ns", "us", "ms", "s"];
    let value = Math.abs(ns), index = 0;
    while (index < 3 && Number(value.toPrecision(3)) >= 1000) { value /= 1000; index += 1; }
    const shown = Number(value.toPrecision(3));
    const digits = shown >= 100 || (index === 0 && Number.isInteger(value)) ? 0 : shown >= 10 ? 1 : 2;
    return `${ns < 0 ? "-" : ""}${value.toFixed(digits)} ${names[index]}`;
  }

  function theme(element) {
    // a probe, because a variable may hold light-dark(...) or another variable, which a canvas does not read
    const probe = document.createElement("span");
    element.append(probe);
    const get = (name) => { probe.style.color = `var(${name}, gray)`; return getComputedStyle(probe).color; };
    const found = { fills: {}, tiles: new Map(), widths: new Map() };
    for (const name of ["page", "card", "text", "quiet", "line", "focus"]) found[name] = get(`--${name}`);
    for (const [style, [variable]] of Object.entries(STYLES)) found.fills[style] = get(variable);
    probe.remove();
    return found;
  }

  function luminance(colour) {
    // WCAG 2.2, relative luminance of 'rgb(r, g, b)'
    const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map((text) => Number(text) / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  const ink = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#ffffff");

  function tile(colours, style) {
    // one canvas of 8 x 8 for each style, kept as long as the colours
    if (colours.tiles.has(style)) return colours.tiles.get(style);
    const canvas = document.createElement("canvas"), pattern = STYLES[style][1];
    canvas.width = canvas.height = 8;
    const g = canvas.getContext("2d");
    g.fillStyle = colours.fills[style];
    g.fillRect(0, 0, 8, 8);
    g.strokeStyle = g.fillStyle = ink(colours.fills[style]);
    g.globalAlpha = 0.45;
    g.lineWidth = 1.6;
    g.beginPath();
    if (pattern === "diagonal") for (const at of [-8, 0, 8]) { g.moveTo(at - 1, 9); g.lineTo(at + 9, -1); }
    if (pattern === "back") for (const at of [-8, 0, 8]) { g.moveTo(at - 1, -1); g.lineTo(at + 9, 9); }
    if (pattern === "vertical") { g.moveTo(4, 0); g.lineTo(4, 8); }
    if (pattern === "horizontal") for (const at of [2, 6]) { g.moveTo(0, at); g.lineTo(8, at); }
    g.stroke();
    if (pattern === "dots") for (const [x, y] of [[1, 1], [5, 5]]) g.fillRect(x, y, 2, 2);
    colours.tiles.set(style, canvas);
    return canvas;
  }

  function swatch(colours, style) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 14;
    const g = canvas.getContext("2d");
    g.fillStyle = g.createPattern(tile(colours, style), "repeat");
    g.fillRect(0, 0, 14, 14);
    return canvas;
  }

  function layout(lanes, gutter, folded, only) {
    // where lanes and rows stand, counted from below the ruler; without a gutter the name of a lane stands above it
    const rows = [], found = [], above = gutter ? 0 : TITLE;
    let y = 2;
    lanes.forEach((lane, number) => {
      if (only !== null && lane.key !== only && lane.key !== "steps") return;
      const levels = folded.has(lane.key) ? 1 : lane.levels;
      found.push({ lane: number, y, height: above + levels * ROW, folded: folded.has(lane.key) });
      y += above;
      for (let row = 0; row < levels; row++, y += ROW) rows.push({ key: `${number}:${row}`, lane: number, row, y });
      y += GAP;
    });
    return { rows, lanes: found, height: y };
  }

  function firstSeen(row, from) {
    // first piece that ends after `from`: pieces are in order and apart
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.length[middle] < from) low = middle + 1; else high = middle;
    }
    return low;
  }

  function sortRow(data, y, view, sorted) {
    // bars by what they are filled with: to change that is what costs most
    const { from, to, left, width, colours, styles } = view, scale = (width - left) / (to - from);
    let last = -1, drawn = -1;
    for (let i = firstSeen(data, from); i < data.start.length && data.start[i] <= to; i++) {
      const x = Math.max(left + (data.start[i] - from) * scale, left - 2);
      const room = Math.min(left + (data.start[i] + data.length[i] - from) * scale, width + 2) - x;
      const wide = Math.max(1, room - (room > 4 ? 1 : 0)), whole = data.count[i] === 1, dim = data.marked !== null && !data.marked[i];
      // a bar of a pixel over a bar of the same look adds nothing
      const look = 4 * data.code[i] + 2 * whole + dim;
      if (wide <= 1 && Math.floor(x) === last && look === drawn) continue;
      last = Math.floor(x);
      drawn = look;
      const tall = whole ? ROW - 2 : Math.max(4, Math.round((ROW - 6) * data.busy[i] / 100));
      const kind = 4 * data.code[i] + 2 * (wide > 5) + dim;
      (sorted.bars[kind] = sorted.bars[kind] || []).push(x, y + ROW - 1 - tall, wide, tall);
      if (data.marked !== null && !dim) sorted.under.push(x, y + ROW - 2, wide, 2);
      if (wide > 34 && data.names[i]) sorted.names.push([data.names[i], x, y, wide, colours.fills[styles[data.code[i]]], dim]);
    }
  }

  function fillAll(g, fill, rects) {
    g.fillStyle = fill;
    for (let i = 0; i < rects.length; i += 4) g.fillRect(rects[i], rects[i + 1], rects[i + 2], rects[i + 3]);
  }

  function paintRows(g, view) {
    const { colours, styles, data } = view, sorted = { bars: [], under: [], names: [] };
    for (const row of view.seen) if (data.has(row.key)) sortRow(data.get(row.key), view.at(row.y), view, sorted);
    for (const [kind, rects] of Object.entries(sorted.bars)) {
      const style = styles[kind >> 2];
      g.globalAlpha = kind & 1 ? 0.22 : 1;
      fillAll(g, kind & 2 ? g.createPattern(tile(colours, style), "repeat") : colours.fills[style], rects);
    }
    g.globalAlpha = 1;
    fillAll(g, colours.text, sorted.under);
    for (const one of sorted.names) name(g, colours, ...one);
    g.globalAlpha = 1;
  }

  function name(g, colours, text, x, y, wide, fill, dim) {
    const room = Math.floor((wide - 8) / 6.2);
    if (room < 4) return;
    const shown = text.length > room ? `${text.slice(0, room - 1)}\u2026` : text;
    g.globalAlpha = dim ? 0.4 : 1;
    g.fillStyle = fill; // over the pattern, so that it can be read
    g.fillRect(x + 2, y + 3, Math.min(wide - 4, measured(g, colours, shown) + 4), ROW - 6);
    g.fillStyle = ink(fill);
    g.fillText(shown, x + 4, y + ROW / 2, wide - 8);
  }

  function measured(g, colours, text) {
    if (colours.widths.size > 5000) colours.widths.clear();
    if (!colours.widths.has(text)) colours.widths.set(text, g.measureText(text).width);
    return colours.widths.get(text);
  }

  function paintStrip(g, view) {
    const { whole, from, to, width, left, colours, strip, styles } = view, scale = (width - left) / (whole.to - whole.from);
    const place = (time) => left + (time - whole.from) * scale;
    g.fillStyle = colours.card;
    g.fillRect(0, 0, width, STRIP - 4);
    if (strip) for (let i = 0; i < strip.start.length; i++) {
      const wide = Math.max(1, strip.length[i] * scale), tall = Math.max(3, (STRIP - 8) * (strip.count[i] === 1 ? 1 : strip.busy[i] / 100));
      g.fillStyle = colours.fills[styles[strip.code[i]]];
      g.fillRect(place(strip.start[i]), STRIP - 5 - tall, wide, tall);
    }
    const x = place(from), wide = Math.max(3, (to - from) * scale);
    g.fillStyle = colours.page;
    g.globalAlpha = 0.65;
    g.fillRect(left, 0, Math.max(0, x - left), STRIP - 4);
    g.fillRect(x + wide, 0, Math.max(0, width - x - wide), STRIP - 4);
    g.globalAlpha = 1;
    g.strokeStyle = colours.focus;
    g.lineWidth = 2;
    g.strokeRect(x + 1, 1, wide - 2, STRIP - 6);
    if (!left) return;
    g.fillStyle = colours.quiet;
    g.fillText("whole recording", 6, (STRIP - 4) / 2);
  }

  function ticks(from, to, width) {
    // steps of 1, 2 or 5 times a power of ten, about 110 pixels apart
    const raw = (to - from) / Math.max(1, width / 110), power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(1, [1, 2, 5, 10].map((by) => by * power).find((by) => by >= raw));
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to && found.length < 64; at += step) found.push(at);
    return { step, found };
  }

  function tick(at, step, last) {
    // one unit for the whole ruler, enough digits that two neighbours differ
    const size = Math.max(last, step), index = size >= 1e9 ? 3 : size >= 1e6 ? 2 : size >= 1e3 ? 1 : 0;
    const unit = 1000 ** index;
    return `${(at / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)))} ${["ns", "us", "ms", "s"][index]}`;
  }

  function eachTick(view, act) {
    const { step, found } = ticks(view.from, view.to, view.width - view.left);
    for (const at of found) act(Math.round(view.x(at)) + 0.5, tick(at, step, view.to));
  }

  function paintLines(g, view, height) {
    g.strokeStyle = view.colours.line;
    g.lineWidth = 1;
    g.beginPath();
    eachTick(view, (x) => { g.moveTo(x, HEAD); g.lineTo(x, height); });
    for (const lane of view.lanesSeen) {
      const y = Math.round(view.at(lane.y) - GAP / 2) + 0.5;
      g.moveTo(0, y);
      g.lineTo(view.width, y);
    }
    g.stroke();
  }

  function paintHead(g, view) {
    const { colours, width, area } = view;
    g.fillStyle = colours.page;
    g.fillRect(0, 0, width, HEAD);
    paintStrip(g, view);
    g.strokeStyle = colours.line;
    g.lineWidth = 1;
    g.strokeRect(-1, STRIP - 0.5, width + 2, RULER);
    g.fillStyle = colours.quiet;
    eachTick(view, (x, text) => { if (x + 4 + g.measureText(text).width <= width) g.fillText(text, x + 4, STRIP + RULER / 2); });
    if (!area) return;
    const [low, high] = [area.from, area.to].map(view.x), text = units(area.to - area.from), wide = g.measureText(text).width;
    const x = Math.min(Math.max((low + high - wide) / 2, view.left + 4), width - wide - 4);
    g.fillStyle = colours.focus;
    g.fillRect(Math.max(low, view.left), HEAD - 4, Math.min(high, width) - Math.max(low, view.left), 3);
    g.fillRect(x - 5, STRIP + 2, wide + 10, RULER - 6);
    g.fillStyle = ink(colours.focus);
    g.fillText(text, x, STRIP + RULER / 2 - 1);
  }

  function paintPointer(g, view, height) {
    // the moment under the pointer, beside the ruler, to a tenth of its steps
    const { pointer, left, width, colours } = view, at = view.from + (pointer - left) / (width - left) * (view.to - view.from);
    g.fillStyle = colours.quiet;
    g.fillRect(Math.round(pointer), HEAD, 1, height - HEAD);
    g.fillStyle = colours.text;
    if (left) g.fillText(`at ${tick(at, ticks(view.from, view.to, width - left).step / 10, view.to)}`, 6, STRIP + RULER / 2);
  }

  function outline(g, view, { lane, row, start, end }, colour, thick) {
    const y = view.rowY(lane, row), x = Math.max(view.x(start), view.left - 4);
    if (y === null || view.x(end) < view.left - 4) return;
    g.strokeStyle = colour;
    g.lineWidth = thick;
    g.strokeRect(x - 1, y, Math.min(Math.max(2, view.x(end) - x), view.width + 8 - x) + 2, ROW);
  }

  function paintArea(g, view) {
    const { from, to, top, bottom } = view.area, low = view.x(from), high = view.x(to);
    g.fillStyle = g.strokeStyle = view.colours.focus;
    g.globalAlpha = 0.13;
    g.fillRect(low, view.at(top), high - low, bottom - top);
    g.globalAlpha = 1;
    g.lineWidth = 1;
    g.strokeRect(Math.round(low) + 0.5, Math.round(view.at(top)) + 0.5, Math.round(high - low), bottom - top);
  }

  function paintArrow(g, view, { kind, source, target }) {
    const near = (x) => Math.min(Math.max(x, -3000), view.width + 3000);
    const fromY = view.rowY(source[0], source[1]), toY = view.rowY(target[0], target[1]);
    if (fromY === null || toY === null) return;
    const x = near(view.x(kind === "launch" ? source[2] : source[3])), end = near(view.x(target[2]));
    const y = fromY + ROW / 2, tip = toY + ROW / 2, bend = Math.min(Math.max(24, Math.abs(end - x) / 2), 160);
    for (const [colour, thick] of [[view.colours.page, 5], [kind === "launch" ? view.colours.text : view.colours.focus, 2]]) {
      g.strokeStyle = g.fillStyle = colour; // a rim keeps it apart from the bars below it
      g.lineWidth = thick;
      g.beginPath();
      g.moveTo(x, y);
      g.bezierCurveTo(x + bend, y, end - bend, tip, end - 6, tip);
      g.stroke();
      g.beginPath();
      g.moveTo(end + thick / 2 - 1, tip);
      g.lineTo(end - 8, tip - 4 - thick / 2);
      g.lineTo(end - 8, tip + 4 + thick / 2);
      g.fill();
    }
  }

  function paintNames(g, view, height) {
    // a name stays in sight as long as its lane is
    const { colours, left } = view;
    if (left) {
      g.fillStyle = colours.card;
      g.fillRect(0, HEAD, left, height - HEAD);
      g.fillStyle = colours.line;
      g.fillRect(left - 1, 0, 1, height);
    }
    for (const { lane, y, height: tall, folded } of view.lanesSeen) {
      const { title, note, levels } = view.lanes[lane], top = Math.max(view.at(y), Math.min(HEAD, view.at(y) + tall - ROW));
      const sign = levels > 1 ? (folded ? "\u25b8 " : "\u25be ") : left ? "   " : "";
      g.fillStyle = colours.text;
      if (!left) {
        g.fillText(fitting(g, `${sign}${title}${note ? ` (${note})` : ""}`, view.width - 6), 2, view.at(y) + TITLE / 2);
        continue;
      }
      g.fillText(fitting(g, sign + title, left - 10), 6, top + ROW / 2);
      const lines = Math.min(Math.floor((view.at(y) + tall - top) / ROW) - 1, 2);
      g.fillStyle = colours.quiet;
      if (note && lines > 0) g.fillText(fitting(g, note, left - 26), 20, top + ROW * 1.5);
    }
  }

  function paint(g, view, height) {
    const { colours, width, left, scroll } = view;
    g.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
    g.fillStyle = colours.page;
    g.fillRect(0, 0, width, height);
    g.font = FONT;
    g.textBaseline = "middle";
    view.x = (time) => left + (time - view.from) / (view.to - view.from) * (width - left);
    view.at = (y) => HEAD + y - scroll;
    const near = (y, tall) => view.at(y) + tall > HEAD && view.at(y) < height;
    view.seen = view.layout.rows.filter((row) => near(row.y, ROW));
    view.lanesSeen = view.layout.lanes.filter((lane) => near(lane.y, lane.height));
    view.rowY = (lane, row) => {
      const levels = view.layout.rows.filter((one) => one.lane === lane);
      return levels.length ? view.at((levels[row] || levels[0]).y) : null;
    };
    paintLines(g, view, height);
    paintRows(g, view);
    if (view.area) paintArea(g, view);
    if (view.hovered) outline(g, view, view.hovered, colours.text, 1);
    for (const arrow of view.arrows) paintArrow(g, view, arrow);
    if (view.selected && view.selected.lane !== null) outline(g, view, view.selected, colours.focus, 3);
    paintNames(g, view, height);
    if (view.active) { g.fillStyle = colours.focus; g.fillRect(left, view.rowY(view.active.lane, view.active.row) + 1, 3, ROW - 2); }
    paintHead(g, view);
    if (view.pointer > left && !view.area) paintPointer(g, view, height);
  }

  function fitting(g, text, room) {
    if (g.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (g.measureText(`${text.slice(0, middle)}\u2026`).width <= room) low = middle; else high = middle - 1;
    }
    return `${text.slice(0, low)}\u2026`;
  }

  return { HEAD, ROW, STRIP, TITLE, units, theme, swatch, layout, firstSeen, paint };
})();
