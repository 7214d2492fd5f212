"use strict";
// What is chosen on the time line (an event, joined events, an area, a row) and what is under the pointer. S is the state of the page,
// `page` what it does. Every text goes into the page as text.
window.gpudiagChoice = (S, page) => {
  const draw = window.gpudiagDraw, make = page.make;
  const LEAST_NS = 200, NEAR = 3, HOVER_MS = 90;

  // -- what is chosen ------------------------------------------------------------------------------------------------

  function pick(data) {
    S.pick += 1;
    S.arrows = [];
    S.asking = data && { number: S.pick, ...data };
    if (S.setup) page.send("timeline-pick", S.asking); // else once the lanes are there
  }

  function pointOf({ lane, row, piece }) {
    const data = S.data.rows.get(`${lane}:${row}`);
    return data.count[piece] === 1 ? { event: `${S.setup.tables[data.table[piece]]}-${data.id[piece]}` }
      : { event: null, lane, row, first: data.first[piece], count: data.count[piece] };
  }

  function select(piece) {
    S.active = S.layout.rows.find((row) => row.lane === piece.lane && row.row === piece.row);
    const point = pointOf(piece);
    S.selected = { event: point.event, lane: piece.lane, row: piece.row, start: piece.start, end: piece.end };
    S.area = null;
    pick(point);
    page.paintSoon();
    page.writeAddress();
  }

  function choose(event, place) {
    // by its name; where it stands is known, or comes with what is told of it
    S.selected = { event, lane: null, row: null, start: null, end: null };
    S.area = null;
    settle(place);
    pick({ event });
    page.writeAddress();
  }

  function settle(place) {
    if (!place || !S.selected || S.selected.lane !== null) return;
    [S.selected.lane, S.selected.row, S.selected.start, S.selected.end] = place;
    reveal(S.selected.lane, S.selected.row);
    S.active = S.layout.rows.find((row) => row.lane === place[0] && row.row === place[1]) || null;
    page.paintSoon();
  }

  function arrows(data) {
    if (!data || data.number !== S.pick) return;
    S.arrows = data.arrows;
    settle(data.place);
    page.paintSoon();
  }

  function letGo() {
    S.selected = S.active = S.area = null;
    pick(null);
    page.writeAddress();
    page.paintSoon();
  }

  function drawArea(x, end, y, bottom) {
    // whole rows; over the ruler those of all lanes
    const above = Math.min(y, bottom) - draw.HEAD + S.scroller.scrollTop, below = Math.max(y, bottom) - draw.HEAD + S.scroller.scrollTop;
    const within = (row) => y < draw.HEAD || (row.y + draw.ROW > above && row.y < below + 1);
    const [from, to] = [page.time(x), page.time(Math.max(end, S.left))].sort((a, b) => a - b);
    S.area = { from: Math.max(from, S.setup.from), to: Math.min(to, S.setup.to), keys: new Set(S.layout.rows.filter(within).map((row) => row.key)) };
    edges(S.area);
    S.selected = null;
    S.arrows = [];
    page.paintSoon();
  }

  function edges(area) {
    const rows = S.layout.rows.filter((row) => area.keys.has(row.key));
    if (!rows.length) { S.area = null; return; }
    area.top = rows[0].y;
    area.bottom = rows[rows.length - 1].y + draw.ROW;
  }

  function chooseArea() {
    if (!S.area) return;
    pick({ from_ns: S.area.from, to_ns: S.area.to, rows: [...S.area.keys].map((key) => key.split(":").map(Number)) });
    page.writeAddress();
  }

  function formatArea() {
    // 'from_to' of all rows, else with the rows of each lane behind it: '..._thread-3:0:5,idle:0:0'; null: no area is chosen
    if (!S.area) return null;
    const { from, to, keys } = S.area, span = `${Math.round(from)}_${Math.round(to)}`;
    if (S.layout.rows.every((row) => keys.has(row.key))) return span;
    const lanes = new Map();
    for (const key of keys) {
      const [lane, row] = key.split(":").map(Number), [low, high] = lanes.get(lane) || [row, row];
      lanes.set(lane, [Math.min(low, row), Math.max(high, row)]);
    }
    return `${span}_${[...lanes].map(([lane, [low, high]]) => `${S.setup.lanes[lane].key}:${low}:${high}`).join(",")}`;
  }

  function openArea(text) {
    // the area that an address names, of the rows that are there
    const found = /^(-?\d{1,18})_(-?\d{1,18})(?:_([-a-z0-9:,]*))?$/.exec(text);
    if (!found || Number(found[2]) <= Number(found[1])) return;
    const named = found[3] && new Map(found[3].split(",").map((part) => part.split(":")).map(([key, low, high]) => [key, [Number(low), Number(high)]]));
    const within = ({ lane, row }) => {
      const [low, high] = named ? named.get(S.setup.lanes[lane].key) || [1, 0] : [0, Infinity];
      return row >= low && row <= high;
    };
    S.area = { from: Number(found[1]), to: Number(found[2]), keys: new Set(S.layout.rows.filter(within).map((row) => row.key)) };
    edges(S.area);
    chooseArea();
    page.paintSoon();
  }

  function zoomToChosen() {
    if (S.area) return page.show(S.area.from, S.area.to);
    if (!S.selected) return;
    if (S.selected.event) return page.focus(S.selected.event);
    page.show(S.selected.start, Math.max(S.selected.end, S.selected.start + LEAST_NS));
  }

  function step(by) {
    const rows = S.layout.rows, at = S.active ? rows.findIndex((row) => row.key === S.active.key) + by : by > 0 ? 0 : rows.length - 1;
    if (!rows.length) return;
    S.active = rows[Math.min(Math.max(at, 0), rows.length - 1)];
    reveal(S.active.lane, S.active.row);
    S.said.textContent = `row ${S.active.row + 1} of ${S.setup.lanes[S.active.lane].title}`;
    page.paintSoon();
  }

  function next(by) {
    if (!S.active) step(1);
    const data = S.active && S.data.rows.get(S.active.key);
    if (!data || !data.start.length) { S.said.textContent = "no event of this row in or near the window"; return; }
    const { lane, row } = S.active, chosen = S.selected && S.selected.lane === lane && S.selected.row === row;
    let at = draw.firstSeen(data, chosen ? S.selected.start : S.from);
    if (chosen) while (at < data.start.length && data.start[at] < S.selected.start) at += 1;
    at += by < 0 ? -1 : chosen && data.start[at] === S.selected.start ? 1 : 0;
    at = Math.min(Math.max(at, 0), data.start.length - 1);
    select(pieceOf(lane, row, at));
    if (data.start[at] < S.from || data.start[at] > S.to) page.pan(data.start[at] - (S.from + S.to) / 2);
  }

  function reveal(lane, row) {
    // scrolls up or down to a row, out of a lane that is folded or left out
    const key = S.setup.lanes[lane].key, hidden = S.lane !== null && S.lane !== key && key !== "steps";
    if (hidden) S.lane = null;
    if ((row > 0 && S.folded.delete(key)) || hidden) page.arrange();
    const found = S.layout.rows.find((one) => one.lane === lane && one.row === row);
    if (!found) return;
    const top = S.scroller.scrollTop, tall = S.height - draw.HEAD;
    if (found.y < top || found.y + draw.ROW > top + tall) S.scroller.scrollTop = found.y - tall / 2;
  }

  // -- what is under the pointer -------------------------------------------------------------------------------------

  function pieceOf(lane, row, piece) {
    const { start, length } = S.data.rows.get(`${lane}:${row}`);
    return { lane, row, piece, start: start[piece], end: start[piece] + length[piece] };
  }

  function hit(x, y) {
    // the piece under a moment of a row, or one within a few pixels of it
    const down = y - draw.HEAD + S.scroller.scrollTop, found = S.layout.rows.find((one) => down >= one.y && down < one.y + draw.ROW);
    const data = found && y >= draw.HEAD && x >= S.left && S.data.rows.get(found.key);
    if (!data) return null;
    const at = page.time(x), near = NEAR * (S.to - S.from) / (S.width - S.left);
    let best = null, least = Infinity;
    for (let i = draw.firstSeen(data, at - near); i < data.start.length && data.start[i] <= at + near; i++) {
      const away = Math.max(data.start[i] - at, at - data.start[i] - data.length[i], 0);
      if (away < least) { least = away; best = i; }
    }
    return best === null ? null : pieceOf(found.lane, found.row, best);
  }

  function laneNamed(x, y) {
    const down = y - draw.HEAD + S.scroller.scrollTop;
    return y < draw.HEAD ? undefined : S.layout.lanes.find((one) => down >= one.y && down < one.y + (x < S.left ? one.height : S.left ? 0 : draw.TITLE));
  }

  function click(x, y) {
    const named = laneNamed(x, y), piece = hit(x, y);
    if (named) return fold(S.setup.lanes[named.lane]);
    if (piece) select(piece); else if (y >= draw.HEAD) letGo();
  }

  function fold(lane) {
    if (lane.levels < 2) return;
    if (!S.folded.delete(lane.key)) S.folded.add(lane.key);
    page.arrange();
    page.ask(false);
  }

  function hover(x, y) {
    const named = laneNamed(x, y), under = named ? null : hit(x, y);
    S.canvas.style.cursor = named && S.setup.lanes[named.lane].levels > 1 ? "pointer" : under ? "default" : "crosshair";
    if (named && S.left) { hide(); sayLane(S.setup.lanes[named.lane]); }
    else if (under === null) return hide();
    else if (!S.hovered || under.lane !== S.hovered.lane || under.row !== S.hovered.row || under.piece !== S.hovered.piece) {
      S.hovered = under;
      tip(under);
      page.paintSoon();
    }
    const box = S.tip.getBoundingClientRect(), right = x + 16 + box.width > S.width;
    S.tip.style.left = `${Math.max(0, right ? x - box.width - 12 : x + 16)}px`;
    S.tip.style.top = `${y + 18}px`; // may reach beyond the frame
  }

  function sayLane({ title, note, levels }) {
    fill(title, [...(note ? [["", note]] : []), ...(levels > 1 ? [["", `${levels} levels, click to fold or unfold`]] : [])]);
    S.tip.hidden = false;
  }

  function tip(under) {
    const { lane, row, piece } = under, data = S.data.rows.get(`${lane}:${row}`), count = data.count[piece], style = S.setup.words[data.code[piece]];
    const title = data.names[piece] || (count > 1 ? `${count.toLocaleString("en")} events, zoom in` : style);
    fill(title, [[count > 1 ? "mostly" : "is", style], ["duration", draw.units(data.length[piece])]]);
    S.tip.hidden = false;
    clearTimeout(S.hoverTimer);
    S.hoverTimer = setTimeout(() => { S.point += 1; page.send("timeline-point", { number: S.point, ...pointOf(under) }); }, HOVER_MS);
  }

  function fill(title, lines) {
    S.tip.replaceChildren(make("strong", {}, title), ...lines.map(([what, value]) => make("div", {}, make("span", {}, `${what} `), value)));
  }

  function pointed(data) {
    if (data && data.number === S.point && S.hovered && !S.tip.hidden) fill(data.title, data.lines);
  }

  function hide() {
    if (S.hovered) { S.hovered = null; page.paintSoon(); }
    clearTimeout(S.hoverTimer);
    S.tip.hidden = true;
  }

  return { pick, select, choose, settle, arrows, letGo, drawArea, edges, chooseArea, formatArea, openArea, zoomToChosen, step, next, click, hover, hide, pointed };
};
