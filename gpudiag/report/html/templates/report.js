"use strict";
// Sorting and filtering of the tables, and the figures in the page's colours. Text is only ever compared, never inserted as HTML.
(() => {
  const cellValue = (row, index, numeric) => {
    const cell = row.cells[index];
    if (!numeric) return cell.textContent;
    return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };

  const compare = (a, b, numeric, direction) => {
    if (a === null || b === null) return (a === null) - (b === null); // not known: last in both directions
    return direction * (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  };

  const sortBy = (table, index) => {
    const header = table.tHead.rows[0].cells[index];
    const numeric = header.classList.contains("number");
    const now = header.getAttribute("aria-sort");
    const descending = now ? now === "ascending" : numeric; // numbers: largest first
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    const keyed = Array.from(body.rows, (row) => [cellValue(row, index, numeric), row]);
    keyed.sort((a, b) => compare(a[0], b[0], numeric, descending ? -1 : 1));
    body.append(...keyed.map((pair) => pair[1]));
  };

  const filter = (table, text, count) => {
    const wanted = text.trim().toLowerCase();
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = wanted === "" ? count.dataset.all : `${shown} of ${table.tBodies[0].rows.length} rows`;
  };

  for (const table of document.querySelectorAll("table.data")) {
    Array.from(table.tHead.rows[0].cells).forEach((header, index) => {
      header.querySelector("button").addEventListener("click", () => sortBy(table, index));
    });
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    const table = document.getElementById(input.dataset.filters);
    const count = document.getElementById(`${input.dataset.filters}-count`);
    count.dataset.all = count.textContent;
    input.addEventListener("input", () => filter(table, input.value, count));
  }

  for (const place of document.querySelectorAll(".figure")) {
    const figure = JSON.parse(document.getElementById(`${place.id}-figure`).textContent);
    const colours = () => {
      const style = getComputedStyle(document.documentElement);
      const [text, line] = [style.getPropertyValue("--text").trim(), style.getPropertyValue("--line").trim()];
      const axis = (name) => ({ [`${name}.gridcolor`]: line, [`${name}.linecolor`]: line, [`${name}.color`]: text });
      return { "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font.color": text, "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": text, "modebar.activecolor": text, ...axis("xaxis"), ...axis("yaxis") };
    };
    const paint = () => Plotly.relayout(place, colours());
    const buttons = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
    const options = { responsive: true, displaylogo: false, modeBarButtons: buttons }; // none that talks to a server
    Plotly.newPlot(place, figure.data, figure.layout, options).then(paint);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    addEventListener("beforeprint", paint);
    addEventListener("afterprint", paint);
  }
  document.documentElement.dataset.ready = "yes";
})();
