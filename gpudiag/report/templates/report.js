"use strict";
// Colours, folded parts, commands to copy, figures. Text is only ever set as text, never as HTML.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

  const theme = document.createElement("button");
  theme.type = "button";
  theme.className = "theme";
  const name = () => (theme.textContent = isDark() ? "Light colours" : "Dark colours");
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);
  name();
  document.querySelector("header").prepend(theme);

  for (const place of document.querySelectorAll(".command, .change")) {
    if (!navigator.clipboard) break;
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(place.querySelector("code").textContent);
      copy.textContent = "Copied";
    });
    place.append(copy);
  }

  // A link to a folded part, or into one, opens it.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1)); // ids of ours need no decoding
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();

  const figures = [];
  const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] }; // none that talks to a server
  const clear = "rgba(0,0,0,0)"; // the style sheet colours what plotly draws, so that it follows theme and paper
  const draw = (place) => {
    const figure = JSON.parse(document.getElementById(`${place.id}-figure`).textContent);
    const layout = { ...figure.layout, paper_bgcolor: clear, plot_bgcolor: clear, modebar: { bgcolor: clear } };
    Plotly.newPlot(place, figure.data, layout, options);
    place.on("plotly_click", ({ points }) => {
      const row = points[0].customdata;
      if (row !== undefined) window.gpudiag?.showOps(null, row);
    });
    figures.push(place);
  };
  // plotly comes last and takes longest: by then the page can be read and used.
  addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll(".figure").forEach(draw);
    root.dataset.ready = "yes";
  });

  // On paper: what matters is unfolded, and figures have the width of the paper.
  const PAPER = 680;
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = Array.from(document.querySelectorAll("details.printed:not([open])"));
    for (const part of opened) part.open = true;
    for (const place of figures) Plotly.relayout(place, { autosize: false, width: PAPER });
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
    for (const place of figures) Plotly.relayout(place, { autosize: true, width: null });
  });
})();
