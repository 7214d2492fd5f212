"use strict";
// Mouse, fingers and keys of the time line: what each does is asked of `act`; S is the state of the page.
window.gpudiagInput = (S, act) => {
  const draw = window.gpudiagDraw;
  const FAR = 4, HOLD_MS = 180, ZOOM = 0.8, MOVE = 0.12;
  const place = (event) => { const box = S.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

  function wheel(event) {
    // as in other time lines: the wheel alone scrolls through the lanes; what two fingers pinch comes with Ctrl
    if (!S.data) return;
    const by = event.deltaMode === 1 ? 30 : 1, perPixel = (S.to - S.from) / (S.width - S.left);
    if (event.ctrlKey || event.metaKey) act.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * by)) * 0.0025), act.time(place(event)[0]));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) act.pan((event.deltaX || event.deltaY) * by * perPixel);
    else return;
    event.preventDefault();
  }

  // -- pointer -------------------------------------------------------------------------------------------------------

  function down(event) {
    if (!S.data || event.button > 1) return;
    const [x, y] = place(event), moves = event.pointerType === "touch" || event.shiftKey || event.button === 1;
    S.pointers.set(event.pointerId, x);
    S.canvas.setPointerCapture(event.pointerId);
    const kind = y < draw.STRIP && x >= S.left ? "strip" : moves ? "move" : x < S.left ? "name" : "area";
    S.drag = { kind, x, y, from: S.from, to: S.to, far: false };
    S.pinch = S.pointers.size === 2 ? { apart: apart(), from: S.from, to: S.to } : null;
    if (kind === "strip") centre(x);
    act.hide();
  }

  const apart = () => { const [a, b] = [...S.pointers.values()]; return Math.max(8, Math.abs(a - b)); };

  function centre(x) {
    const at = S.setup.from + ((x - S.left) / (S.width - S.left)) * (S.setup.to - S.setup.from), half = (S.to - S.from) / 2;
    act.show(at - half, at + half);
  }

  function move(event) {
    if (!S.data) return;
    const [x, y] = place(event), drag = S.drag;
    S.pointer = x;
    act.paintSoon();
    if (!drag || !S.pointers.has(event.pointerId)) return act.hover(x, y);
    S.pointers.set(event.pointerId, x);
    drag.far = drag.far || Math.abs(x - drag.x) > FAR;
    if (S.pinch && S.pointers.size === 2) {
      const middle = (S.pinch.from + S.pinch.to) / 2, half = (S.pinch.to - S.pinch.from) / 2 * S.pinch.apart / apart();
      return act.show(middle - half, middle + half);
    }
    if (drag.kind === "strip") return centre(x);
    if (drag.kind === "area" && drag.far) return act.drawArea(drag.x, x, drag.y, y);
    const by = (drag.x - x) / (S.width - S.left) * (drag.to - drag.from);
    if (drag.kind === "move" && drag.far) act.show(drag.from + by, drag.to + by);
  }

  function up(event) {
    const drag = S.drag, [x, y] = place(event);
    S.pointers.delete(event.pointerId);
    if (S.pointers.size) return;
    S.drag = S.pinch = null;
    if (!drag || event.type === "pointercancel" || drag.kind === "strip") return act.paintSoon();
    if (drag.far) return drag.kind === "area" ? act.chooseArea() : undefined;
    act.click(x, y);
  }

  function leave() { S.pointer = null; act.hide(); act.paintSoon(); }

  // -- keys ----------------------------------------------------------------------------------------------------------

  const middle = () => S.pointer !== null && S.pointer > S.left ? act.time(S.pointer)
    : S.selected && S.selected.lane !== null && S.selected.start >= S.from && S.selected.start <= S.to ? S.selected.start : (S.from + S.to) / 2;
  const by = (share) => () => act.pan(share * (S.to - S.from));
  const HELD = { w: (part) => act.zoom(ZOOM ** part, middle()), s: (part) => act.zoom(ZOOM ** -part, middle()),
    a: (part) => by(-MOVE * part)(), d: (part) => by(MOVE * part)() };
  const KEYS = {
    ArrowLeft: by(-0.2), ArrowRight: by(0.2), "+": () => act.zoom(0.6, middle()), "=": () => act.zoom(0.6, middle()),
    "-": () => act.zoom(1 / 0.6, middle()), _: () => act.zoom(1 / 0.6, middle()), 0: act.fit, Home: act.fit,
    ArrowUp: () => act.step(-1), ArrowDown: () => act.step(1), n: () => act.next(1), p: () => act.next(-1), m: () => act.search(1),
    M: () => act.search(-1), f: act.zoomToChosen, Enter: act.zoomToChosen, Escape: act.letGo, "/": act.focusSearch,
  };
  const held = new Map();

  function key(event) {
    const name = event.key.length === 1 && HELD[event.key.toLowerCase()] ? event.key.toLowerCase() : event.key;
    if (!(HELD[name] || KEYS[name]) || !S.data || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (KEYS[name]) return KEYS[name]();
    if (held.has(name)) return;
    HELD[name](1);
    const since = performance.now();
    held.set(name, since);
    requestAnimationFrame((now) => repeat(name, since, now));
  }

  function repeat(name, since, before) {
    // as long as the key is held down, a step every 60 ms in as many pieces as there are frames
    if (held.get(name) !== since || !S.root.isConnected) return;
    const now = performance.now();
    if (now - since > HOLD_MS) HELD[name](Math.min(1, (now - before) / 60));
    requestAnimationFrame(() => repeat(name, since, now));
  }

  S.scroller.addEventListener("keydown", key);
  S.scroller.addEventListener("keyup", (event) => held.delete(event.key.toLowerCase()));
  S.scroller.addEventListener("blur", () => held.clear());
  S.canvas.addEventListener("wheel", wheel, { passive: false });
  S.canvas.addEventListener("dblclick", act.zoomToChosen);
  for (const [name, listen] of [["pointerdown", down], ["pointermove", move], ["pointerup", up], ["pointercancel", up], ["pointerleave", leave]])
    S.canvas.addEventListener(name, listen);
};
