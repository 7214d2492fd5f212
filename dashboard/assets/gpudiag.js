"use strict";
// What Dash cannot do from Python: the window's title, and where the keyboard stands after a page has changed.
const seek = (rule, tries) => {
  // the finding that a link names: its card comes with a callback, a moment after the page
  if (!rule || tries === 0) return;
  const card = document.getElementById(`finding-${rule}`);
  if (card === null) {
    setTimeout(() => seek(rule, tries - 1), 100);
    return;
  }
  card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "start" });
};

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
