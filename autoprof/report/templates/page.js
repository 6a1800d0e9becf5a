"use strict";
// Theme, search, sorting of tables, zoom of charts, flame graphs; unfolds the target of a link.
(() => {
  const root = document.documentElement;
  const all = (selector, place = document) => Array.from(place.querySelectorAll(selector));

  // The theme: the system's, light or dark.
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const remembered = () => {
    try {
      return localStorage.getItem("autoprof-theme");
    } catch {
      return null;
    }
  };
  const wear = (theme) => {
    root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  button.addEventListener("click", () => {
    const theme = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    try {
      localStorage.setItem("autoprof-theme", theme);
    } catch {
      // A page opened from a file may have no storage; the choice then applies to this page only.
    }
    wear(theme);
  });
  wear(themes.includes(remembered()) ? remembered() : "system");

  // Tables: the button of a column sorts by it; a second click reverses the order.
  const values = (row, column) => {
    const cell = row.cells[column];
    if ("value" in cell.dataset) {
      return cell.dataset.value === "" ? null : Number(cell.dataset.value);
    }
    return cell.textContent.trim();
  };
  const compared = (a, b) =>
    typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  const sort = (table, column) => {
    const header = table.tHead.rows[0].cells[column];
    const number = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : number ? "descending" : "ascending";
    const way = order === "ascending" ? 1 : -1;
    for (const cell of table.tHead.rows[0].cells) {
      cell.removeAttribute("aria-sort");
    }
    header.setAttribute("aria-sort", order);
    const rows = Array.from(table.tBodies[0].rows, (row) => [values(row, column), row]);
    // Rows without a value come last in both orders.
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : way * compared(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  for (const table of all("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach((cell, column) => {
      cell.querySelector("button")?.addEventListener("click", () => sort(table, column));
    });
  }

  // Search: shows the findings and steps that contain all words, and the findings of one kind.
  const filter = document.getElementById("filter");
  const choose = () => {
    // `step 1` is one word, and is not in `step 12`.
    const words = filter.querySelector("input").value.toLowerCase().match(/step \d+|\S+/g) ?? [];
    const kind = filter.querySelector("select")?.value ?? "";
    const isIn = (text, word) => text.includes(word) && (!/^step \d/.test(word) || new RegExp(word + "\\b").test(text));
    const has = (text) => words.every((word) => isIn(text.toLowerCase(), word));
    const shown = (places, test) => places.filter((place) => !(place.hidden = !test(place))).length;
    const found = all("#findings > .findings > li");
    const count = shown(found, (item) => (!kind || item.dataset.kind === kind) && has(item.textContent));
    const steps = all("#steps > .step");
    const ofKind = (step) => !kind || step.querySelector(`.findings > [data-kind="${kind}"]`);
    const stepCount = shown(steps, (step) => ofKind(step) && has(step.textContent));
    shown(all("#all-steps tbody tr"), (row) => has("step " + Array.from(row.cells, (cell) => cell.textContent).join(" ")));
    filter.querySelector("output").textContent =
      words.length || kind ? `${count} of ${found.length} findings, ${stepCount} of ${steps.length} steps` : "";
  };
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("input", choose);
    filter.addEventListener("submit", (event) => event.preventDefault());
  }

  // Zoom: makes the rows of a chart wider than its place, which then scrolls.
  for (const each of all("[data-zoom]")) {
    each.addEventListener("click", () => {
      const rows = each.closest(".chart").querySelector(".rows");
      const zoom = Math.min(64, Math.max(1, Number(rows.dataset.times ?? 1) * Number(each.dataset.zoom)));
      rows.dataset.times = zoom;
      rows.style.width = zoom * 100 + "%";
    });
  }

  // Commands can be copied where the browser allows it: not from a page that was loaded over plain HTTP.
  for (const each of navigator.clipboard ? all("[data-copy]") : []) {
    each.hidden = false;
    each.addEventListener("click", async () => {
      await navigator.clipboard.writeText(each.previousElementSibling.textContent);
      each.textContent = "Copied";
      setTimeout(() => (each.textContent = "Copy"), 2000);
    });
  }

  // `autoprof open` serves the page on this machine, and the traces beside it.
  if (/^https?:$/.test(location.protocol) && ["127.0.0.1", "localhost"].includes(location.hostname)) {
    all(".served").forEach((each) => (each.hidden = false));
    all(".alone").forEach((each) => (each.hidden = true));
  }

  // Flame graphs. A node is [index of the caller, name, category, microseconds].
  const flames = JSON.parse(document.getElementById("flames")?.textContent ?? "{}");
  const seconds = (us) => (us >= 1e6 ? (us / 1e6).toPrecision(3) + " s" : (us / 1e3).toPrecision(3) + " ms");
  const made = (tag, text, name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
  const speedscope = (name, threads) => {
    const frames = new Map();
    const frame = (text) => frames.get(text) ?? (frames.set(text, frames.size), frames.size - 1);
    const profiles = threads.map(([thread, , nodes]) => {
      const own = nodes.map((node) => node[3]);
      const stacks = [];
      nodes.forEach(([parent, text, , us], index) => {
        if (parent >= 0) {
          own[parent] -= us;
        }
        stacks[index] = [...(stacks[parent] ?? []), frame(text)];
      });
      const weights = own.map((us) => Math.max(0, us));
      const end = weights.reduce((sum, us) => sum + us, 0);
      return { type: "sampled", name: thread, unit: "microseconds", startValue: 0, endValue: end, samples: stacks, weights };
    });
    const shared = { frames: Array.from(frames.keys(), (text) => ({ name: text })) };
    return { $schema: "https://www.speedscope.app/file-format-schema.json", name, exporter: "autoprof", shared, profiles };
  };
  const draw = (place, nodes, focus) => {
    // Callers of the focus fill the whole width; only the focus and the calls within it have their own places.
    const callers = new Set();
    for (let at = focus; at >= 0; at = nodes[at][0]) {
      callers.add(at);
    }
    const whole = focus < 0 ? nodes.reduce((sum, [parent, , , us]) => sum + (parent < 0 ? us : 0), 0) : nodes[focus][3];
    const ends = new Map([[-1, 0]]);
    const [depth, left] = [[], []];
    const bars = [];
    nodes.forEach(([parent, name, category, us], index) => {
      const isCaller = callers.has(index) && index !== focus;
      const within = focus < 0 || index === focus || depth[parent]?.within;
      depth[index] = { row: (depth[parent]?.row ?? -1) + 1, within };
      if (!within && !isCaller) {
        return;
      }
      const start = isCaller || index === focus ? 0 : ends.get(parent);
      left[index] = start;
      ends.set(index, start);
      ends.set(parent, start + us);
      const width = isCaller ? 100 : (100 * us) / whole;
      if (width < 0.05) {
        return;
      }
      const kind = category.startsWith("python") ? "idle" : category.includes("annotation") ? "own" : "more";
      const bar = made("button", width > 1 ? name : "", "fill-" + kind);
      bar.type = "button";
      bar.title = `${name}: ${seconds(us)}`;
      bar.style = `left:${(isCaller ? 0 : (100 * start) / whole).toFixed(3)}%;width:${width.toFixed(3)}%;top:${depth[index].row * 17}px`;
      bar.addEventListener("click", () => draw(place, nodes, index === focus ? nodes[index][0] : index));
      bars.push(bar);
    });
    place.style.height = (Math.max(0, ...depth.map(({ row }) => row)) + 1) * 17 + "px";
    place.replaceChildren(...bars);
  };
  const flame = (place) => {
    const threads = flames[place.dataset.flame];
    const [bar, area] = [made("p", "", "tools"), made("div", "", "calls")];
    const select = made("select", "");
    select.ariaLabel = "thread";
    threads.forEach(([name, us], index) => select.append(new Option(`${name}, ${seconds(us)}`, index)));
    select.addEventListener("change", () => draw(area, threads[select.value][2], -1));
    const save = made("button", "Download for speedscope");
    save.addEventListener("click", () => {
      const file = new Blob([JSON.stringify(speedscope(place.dataset.flame, threads))], { type: "application/json" });
      const link = made("a", "");
      link.href = URL.createObjectURL(file);
      link.download = place.dataset.flame.replace(/[^\w.-]+/g, ".") + ".speedscope.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
    bar.append(...(threads.length > 1 ? [select] : []), save);
    place.append(bar, area);
    draw(area, threads[0][2], -1);
  };
  for (const place of all("[data-flame]")) {
    const capture = place.closest("details");
    const unfold = () => {
      if (capture.open && !place.childElementCount) {
        flame(place);
      }
    };
    capture.addEventListener("toggle", unfold);
    unfold();
  }

  // Unfold the target of a link.
  const show = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", show);
  show();
})();
