"use strict";
// Tables that sort, filter, group and page. Rows come as data; their texts are only ever compared and set as text, never as HTML.
(() => {
  const make = (name, text, attributes) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
    return made;
  };
  const textOf = (cell) => (typeof cell === "string" ? cell : cell[0]);
  const valueOf = (cell) => (typeof cell === "string" ? null : cell[1]);
  const searched = (row) => (row.s ??= row.c.map((cell) => (typeof cell === "string" ? cell : [cell[0], ...cell.slice(2)].join("\n"))).join("\n").toLowerCase());
  const compare = (a, b, direction) => {
    if (a === null || b === null) return (a === null) - (b === null); // not known: last in both directions
    return direction * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  };

  class Table {
    constructor(element, data) {
      this.element = element;
      this.data = data;
      this.tools = document.querySelector(`[data-tools="${element.id}"]`);
      this.count = document.getElementById(`${element.id}-count`);
      this.pager = this.tools.querySelector(".pager");
      this.chip = this.tools.querySelector(".chip");
      this.filter = this.tools.querySelector("[data-filters]");
      this.chooser = this.tools.querySelector("[data-views]");
      Object.assign(this, { view: data.views[0], sort: null, only: null, marked: null, at: 0 });
      this.listen();
      this.turn(0);
    }

    listen() {
      this.filter?.addEventListener("input", () => this.change({}));
      this.chooser?.addEventListener("change", () => this.look(this.chooser.value));
      this.element.tHead.addEventListener("click", (event) => {
        const header = event.target.closest("th");
        if (header) this.sortBy(header.cellIndex);
      });
      this.element.tBodies[0].addEventListener("click", (event) => {
        const row = event.target.closest("button") ? this.shown[event.target.closest("tr").sectionRowIndex] : null;
        if (row) this.show(row.k, null);
      });
      this.pager.addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (button) this.turn(Number(button.dataset.turn));
      });
    }

    // Show another view of the figures: nothing of the old one's order is left.
    look(id) {
      this.view = this.data.views.find((view) => view.id === id) ?? this.data.views[0];
      if (this.chooser) this.chooser.value = this.view.id;
      this.head();
      this.change({ sort: null, only: null, marked: null });
    }

    // Show the rows with these keys alone, with one of them marked.
    show(only, marked) {
      this.look(this.data.views[0].id);
      if (this.filter) this.filter.value = "";
      this.change({ only, marked });
      if (marked !== null) this.turnTo(this.rows().findIndex((row) => row === this.view.rows[marked]));
      this.element.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
    }

    change(changed) {
      Object.assign(this, changed, { at: 0, ordered: null });
      this.turn(0);
    }

    sortBy(index) {
      const numeric = this.view.columns[index][1] === 1;
      const descending = this.sort?.index === index ? !this.sort.descending : numeric; // numbers: largest first
      this.change({ sort: { index, descending, numeric } });
    }

    rows() {
      if (this.ordered) return this.ordered;
      const wanted = this.filter?.value.trim().toLowerCase() ?? "";
      const keys = Object.entries(this.only ?? {});
      const rows = this.view.rows.filter((row) => keys.every(([key, value]) => row.k?.[key] === value) && (wanted === "" || searched(row).includes(wanted)));
      if (this.sort) {
        const { index, descending, numeric } = this.sort;
        const of = numeric ? valueOf : textOf;
        rows.sort((a, b) => compare(of(a.c[index]), of(b.c[index]), descending ? -1 : 1));
      }
      return (this.ordered = rows);
    }

    turnTo(index) {
      if (index < 0) return;
      this.at = index - (index % this.data.page);
      this.turn(0);
    }

    turn(pages) {
      const rows = this.rows();
      const last = Math.max(0, rows.length - 1);
      this.at = Math.min(Math.max(0, this.at + pages * this.data.page), last - (last % this.data.page));
      this.shown = rows.slice(this.at, this.at + this.data.page);
      this.element.tBodies[0].replaceChildren(...this.shown.map((row) => this.row(row)));
      if (pages) this.element.parentElement.scrollTop = 0;
      this.head();
      this.tell(rows);
    }

    row(row) {
      const made = make("tr");
      if (this.marked !== null && row === this.view.rows[this.marked]) made.setAttribute("aria-current", "true");
      row.c.forEach((cell, index) => {
        const place = make("td", "", this.view.columns[index][1] ? { class: "number" } : {});
        const opens = index === 0 && row.k && this.view !== this.data.views[0];
        place.append(opens ? make("button", textOf(cell), { type: "button", class: "link", title: "show its ops" }) : textOf(cell));
        if (typeof cell !== "string") for (const line of cell.slice(2)) place.append(make("small", line));
        made.append(place);
      });
      return made;
    }

    head() {
      const heads = this.element.tHead.rows[0];
      if (heads.dataset.view !== this.view.id) {
        const focused = heads.contains(document.activeElement);
        heads.replaceChildren(
          ...this.view.columns.map(([title, numeric, help]) => {
            const header = make("th", "", { scope: "col", ...(numeric ? { class: "number" } : {}) });
            header.append(make("button", title, { type: "button", ...(help ? { title: help } : {}) }));
            return header;
          }),
        );
        heads.dataset.view = this.view.id;
        if (focused) heads.querySelector("button").focus();
      }
      Array.from(heads.cells).forEach((header, index) => {
        if (this.sort?.index === index) header.setAttribute("aria-sort", this.sort.descending ? "descending" : "ascending");
        else header.removeAttribute("aria-sort");
      });
    }

    // Say which rows are shown, of how many, and by which key.
    tell(rows) {
      const number = (value) => value.toLocaleString("en");
      const kept = this.view.rows.length;
      const cut = kept < this.view.count ? `the ${number(kept)} largest of ` : "";
      const all = `${cut}${number(this.view.count)} row${this.view.count === 1 ? "" : "s"}`;
      const few = rows.length < kept ? `${number(rows.length)} of ${all}` : all;
      const paged = rows.length > this.shown.length;
      this.count.textContent = paged ? `${number(this.at + 1)} to ${number(this.at + this.shown.length)} of ${few}` : few;
      this.pager.hidden = !paged;
      const [back, on] = this.pager.children;
      back.disabled = this.at === 0;
      on.disabled = this.at + this.data.page >= rows.length;
      const [only] = Object.entries(this.only ?? {});
      this.chip.hidden = !only;
      this.chip.replaceChildren();
      if (!only) return;
      const close = make("button", "show all", { type: "button" });
      close.addEventListener("click", () => {
        this.change({ only: null, marked: null });
        (this.filter ?? this.element.tHead.querySelector("button")).focus();
      });
      this.chip.append(`${only[0]} ${only[1]} `, close);
    }
  }

  const tables = {};
  for (const element of document.querySelectorAll("table.data")) {
    tables[element.id] = new Table(element, JSON.parse(document.getElementById(`${element.id}-data`).textContent));
  }

  // What is called from elsewhere on the page: the ops of a name (or of the row at a place), with that row marked.
  const showOps = (only, marked = null) => {
    const table = tables.ops;
    if (!table) return;
    const row = marked === null ? null : table.data.views[0].rows[marked];
    table.show(only ?? (row?.k?.op ? { op: row.k.op } : {}), row ? marked : null);
    document.getElementById("ops-title").scrollIntoView({ block: "start" });
  };
  for (const link of document.querySelectorAll("a[data-op]")) link.addEventListener("click", () => showOps({ op: link.dataset.op }));
  window.gpudiag = { showOps };
})();
