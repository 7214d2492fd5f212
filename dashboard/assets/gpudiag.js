"use strict";
// What Dash cannot do from Python: the window's title, where the keyboard stands after a page has changed, the colours, and the height
// of the head below which heads of tables stay in sight.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "gpudiag-theme";
  const read = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a browser that keeps nothing
    }
  };
  const paint = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  };
  paint(read());
  const turn = () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // it holds for this page alone
    }
    paint(next);
  };

  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (button?.id === "theme") turn();
  });

  const measure = () => {
    const head = document.getElementById("head");
    const stays = head !== null && getComputedStyle(head).position === "sticky";
    const height = `${stays ? head.offsetHeight : 0}px`;
    if (root.style.getPropertyValue("--head") !== height) root.style.setProperty("--head", height);
  };
  const watch = () => {
    const head = document.getElementById("head");
    if (head === null) setTimeout(watch, 50);
    else new ResizeObserver(measure).observe(head);
  };
  watch();
})();

const seek = (rule, tries) => {
  // the finding that a link names: its card comes with a callback, a moment after the page
  if (!rule || tries === 0) return;
  const card = document.getElementById(`finding-${rule}`);
  if (card === null) {
    setTimeout(() => seek(rule, tries - 1), 100);
    return;
  }
  const head = document.getElementById("head"); // it stays at the top, and would cover the title
  const covered = getComputedStyle(head).position === "sticky" ? head.offsetHeight : 0;
  document.documentElement.style.scrollPaddingTop = `${covered + 8}px`;
  for (let part = card; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "start" });
};

// Buttons that copy the code before them; where no clipboard may be written to, the code is selected.
document.addEventListener("click", async ({ target }) => {
  if (!(target instanceof Element) || !target.matches("button.copy")) return;
  const code = target.previousElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    target.textContent = "Selected";
  }
});

window.dash_clientside = Object.assign({}, window.dash_clientside, {
  gpudiag: {
    arrived: (shown) => {
      if (!shown) return window.dash_clientside.no_update;
      document.title = shown.title;
      const here = document.activeElement;
      const lost = here === null || here === document.body || !document.contains(here) || here.closest("#head nav") !== null;
      if (lost && shown.moved) document.getElementById("main").focus({ preventScroll: true });
      seek(new URLSearchParams(location.search).get("rule"), 100);
      return window.dash_clientside.no_update;
    },
  },
});
