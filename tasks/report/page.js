"use strict";
// Draws the whole page from the JSON block. Text reaches the document through textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const tip = document.getElementById("tip");
  const dialog = document.getElementById("provenance");
  const SVG = "http://www.w3.org/2000/svg";
  const order = data.policies.map((p) => p.name);
  const title = (name) => name === "retriever" ? "Retriever" : name.startsWith("retriever:") ? name.slice(10) : (data.policies.find((p) => p.name === name) || { title: name }).title;
  const colour = (name) => `var(--p${Math.max(0, order.indexOf(name)) % 12})`;

  // Elements

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key.startsWith("--") || key === "background" || key === "fill" || key === "stroke") node.style.setProperty(key, value);
      else node.setAttribute(key, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  const WITHOUT_LINK = ["parts", "health-table", "signal", "evidence", "variance", "reward-models-turns", "reward-models-later", "audit"];  // They follow the section they belong to.
  function section(id, name, lead, ...children) {
    if (!WITHOUT_LINK.includes(id)) document.getElementById("nav").append(h("a", { href: `#${id}` }, name));
    const node = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, name), lead && h("p", { class: "lead" }, lead), children);
    main.append(node);
    return node;
  }
  function table(header, rows, attributes) {
    return scroller("table", h("table", attributes || {},
      h("thead", {}, h("tr", {}, header.map((text) => h("th", { scope: "col", class: text instanceof Node ? text.className : null }, text)))), h("tbody", {}, rows)));
  }
  // Let a heading sort the rows below it, by number where the cells begin with one. Rows of single seeds go with theirs.
  function sortable(node) {
    const body = node.querySelector("tbody"), heads = [...node.querySelectorAll("th")];
    const value = (group, i) => { const text = group[0].children[i].textContent.trim().replace("\u2212", "-").replaceAll(",", ""); return [Number.parseFloat(text), text]; };
    const ahead = ([a, aText], [b, bText]) => (Number.isNaN(a) && Number.isNaN(b) ? aText.localeCompare(bText) : Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : a - b);
    heads.forEach((head, i) => {
      const sort = () => {
        const isDown = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        const groups = [];
        for (const line of body.children) { if (line.classList.contains("seedrow") && groups.length) groups[groups.length - 1].push(line); else groups.push([line]); }
        groups.sort((a, b) => (isDown ? -1 : 1) * ahead(value(a, i), value(b, i)));
        body.append(...groups.flat());
      };
      head.classList.add("sorts");
      fill(head, { tabindex: 0, title: "Sort by this column", onclick: sort, onkeydown: (event) => { if (event.key === "Enter") sort(); } }, []);
    });
    return node;
  }
  // A box that scrolls sideways, and says so while there is something to scroll to.
  function scroller(label, content) {
    const hint = h("p", { class: "hint", hidden: true }, "Scroll sideways for more columns \u2192");
    const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
    const sizes = new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth + 1; });
    for (const node of [box, content]) sizes.observe(node);
    return h("div", {}, hint, box);
  }
  const row = (cells, attributes) => h("tr", attributes || {}, cells.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : h("td", {}, cell))));
  const swatch = (policy) => h("span", { class: "swatch", "--c": colour(policy) });

  // Tooltip

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
    const top = y + 16 + box.height > innerHeight ? y - box.height - 12 : y + 16;
    tip.style.setProperty("left", `${Math.max(4, left)}px`);
    tip.style.setProperty("top", `${Math.max(4, top)}px`);
  }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });

  // Numbers

  const known = (value) => typeof value === "number" && Number.isFinite(value);
  // Shares are fractions with three decimals everywhere, as in results.md and results.csv.
  const fraction = (value) => value.toFixed(3);
  // The interval of a cell, null where none can be given.
  const ends = (cell) => (known(cell.low) && known(cell.high) ? [cell.low, cell.high] : null);
  const between = (cell, text = fraction) => (ends(cell) ? ends(cell).map(text).join(" \u2013 ") : null);
  const signed = (text) => (text.startsWith("-") ? `\u2212${text.slice(1)}` : `+${text}`);
  function short(value) {
    if (!known(value)) return "\u2013";
    const size = Math.abs(value);
    if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
    if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
    if (size >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
    if (size >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
    if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
    if (size >= 1) return value.toFixed(2);
    if (size >= 1e-3) return value.toFixed(3);
    return value === 0 ? "0" : value.toExponential(1);
  }
  // An axis label: `short` without the zeros that carry nothing.
  const brief = (value) => short(value).replace(/(\.\d*?)0+(?=$|[kMGe])/, "$1").replace(/\.(?=$|[kMGe])/, "");
  function duration(seconds) {
    if (!known(seconds)) return "\u2013";
    if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    return seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  const cells = new Map(data.cells.map((c) => [c.slice(0, 6).join("\u0000"), { policy: c[0], seed: c[1], dataset: c[2], hops: c[3], mode: c[4], metric: c[5], value: c[6], low: c[7], high: c[8], count: c[9] }]));
  function find(policy, metric, at = {}) {
    return cells.get([policy, at.seed ?? "all", at.dataset ?? "all", at.hops ?? "all", at.mode ?? "greedy", metric].join("\u0000"));
  }

  // Provenance

  const METRIC = {
    em: "exact match", f1: "word F1", subem: "substring match", recall: "recall of gold passages", answer_in_passage: "answer in a returned passage", searches: "searches per question",
    valid_action_rate: "share of valid actions", answered: "share of questions answered", failed: "share of questions that failed", generated_tokens: "generated tokens", prefill_tokens: "prefilled tokens",
    [data.gain]: `exact match minus ${title(data.reference)}`, steps: "training steps", num_trajectories: "training trajectories",
  };
  const metricName = (metric) => METRIC[metric] || metric.replaceAll("_", " ");

  function pairs(entries) {
    return h("dl", {}, entries.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]));
  }
  function command(text) { return h("pre", { class: "command", tabindex: 0, "aria-label": "command" }, text); }
  function flat(value, prefix = "") {
    if (value === null || typeof value !== "object") return [[prefix, value === null ? "null" : String(value)]];
    if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return [[prefix, value.join(", ")]];
    return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
  }
  function stageFacts(stage) {
    const found = stage.ledger || {};
    return pairs([
      ["stage", h("code", {}, stage.stage)],
      ["settings", stage.config_sha256 && [h("code", {}, stage.config_sha256), " is the hash of those in ", h("code", {}, stage.plan)]],
      ["git commit", found.git_commit ? h("code", {}, found.git_commit.slice(0, 12), found.git_dirty ? " (with local changes)" : "") : "not recorded on this machine"],
      ["parts of one's own", Object.entries(found.own_parts || {}).map((file) => file.join(" ")).join(", ")],
      ["libraries", Object.entries(found.libraries || {}).map((library) => library.join(" ")).join(", ")],
      ["MLflow run", found.mlflow_run_id && h("code", {}, found.mlflow_run_id)],
      ["took", known(found.seconds) ? duration(found.seconds) : null],
      ["ended", found.ended],
      ["peak memory", known(found.peak_rss_mb) ? `${found.peak_rss_mb.toFixed(0)} MB` : null],
    ]);
  }
  function openDialog(name, ...body) {
    dialog.replaceChildren();
    fill(dialog, {}, [h("header", {}, h("h2", { id: "provenance-title" }, name), h("button", { onclick: () => dialog.close(), "aria-label": "Close" }, "Close")), body]);
    dialog.showModal();
    dialog.scrollTop = 0;
  }
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  function showProvenance(cell) {
    const seeds = cell.seed === "all" ? data.seeds.map(String) : [cell.seed];
    const sources = seeds.map((seed) => [seed, data.provenance[`${cell.policy}-${seed}`]]).filter(([, found]) => found);
    const value = [known(cell.value) ? cell.value.toFixed(6) : "", known(cell.low) ? ` [${cell.low.toFixed(6)}, ${cell.high.toFixed(6)}]` : ""].join("");
    const part = [cell.dataset === "all" ? "all datasets" : cell.dataset, cell.hops === "all" ? "all hop counts" : `${cell.hops} hops`].join(", ");
    const over = cell.seed === "all" ? data.coverage : `over questions, resampled ${data.num_resamples.toLocaleString("en")} times`;
    const interval = known(cell.low) && ["greedy", "sampled"].includes(cell.mode) ? `95% ${over}` : null;
    const first = sources.length ? sources[0][1] : null;
    const makers = cell.policy === "retriever" ? ["data", "validate", "index", "recall"] : cell.policy.startsWith("retriever:") ? ["data", "validate", "retrievers"] : [];
    const shared = data.data_stages.filter((stage) => makers.includes(stage.stage));
    openDialog(`${title(cell.policy)}: ${metricName(cell.metric)}`,
      pairs([["value", h("strong", {}, value)], ["questions", cell.count], ["part", part], ["mode", cell.mode], ["interval", interval], ["seeds", first && seeds.join(", ")], ["data", h("code", {}, Object.values(data.provenance)[0].data_sha256)]]),
      shared.map((stage) => [stageFacts(stage), command(stage.command)]),
      sources.map(([seed, found]) => [
        h("h3", {}, `Seed ${seed}`),
        pairs([["policy", h("code", {}, found.policy_sha256)]]),
        found.stages.map((stage) => stageFacts(stage)),
        command(found.stages[cell.mode === "training" ? 1 : 0].command),
        cell.seed === "all" && known(cell.value) && cells.has([cell.policy, seed, cell.dataset, cell.hops, cell.mode, cell.metric].join("\u0000"))
          ? h("p", { class: "note" }, `This seed alone: ${find(cell.policy, cell.metric, { ...cell, seed }).value.toFixed(6)}`) : null,
      ]),
      first && h("details", {}, h("summary", {}, "Settings used, the main ones"), pairs(flat({ evaluation: first.settings, ...(first.training_settings ? { training: first.training_settings } : {}) }))));
  }
  // A number that opens its provenance; `text` decides how it reads.
  function number(cell, text, range) {
    if (!cell) return h("td", {}, "\u2013");
    const label = `${title(cell.policy)}, ${metricName(cell.metric)}: ${text}. Show where it comes from`;
    return h("td", {}, h("button", { class: "cell", "aria-label": label, onclick: () => showProvenance(cell) }, text, range && h("span", { class: "range" }, range)));
  }
  const share = (cell) => cell && number(cell, fraction(cell.value), between(cell));
  const value = (cell) => cell && number(cell, fraction(cell.value));
  const plain = (cell, digits) => cell && number(cell, cell.value.toFixed(digits));
  function difference(cell) {
    if (!cell) return h("td", {}, "\u2013");
    const node = number(cell, signed(fraction(cell.value)), between(cell, (value) => signed(fraction(value))));
    node.firstChild.classList.add(ends(cell) && cell.low > 0 ? "up" : ends(cell) && cell.high < 0 ? "down" : "same");
    return node;
  }

  // Interval bars

  function intervalBar(cell, seeds, width = 94) {
    const x = (value) => 4 + (width - 8) * Math.min(1, Math.max(0, value));
    const label = `${title(cell.policy)} ${metricName(cell.metric)} ${fraction(cell.value)}${ends(cell) ? `, interval ${ends(cell).map(fraction).join(" to ")}` : ""}`;
    return s("svg", { viewBox: `0 0 ${width} 26`, width, height: 26, role: "img", "aria-label": label },
      [0, 0.25, 0.5, 0.75, 1].map((tick) => s("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 0, y2: 26 })),
      s("rect", { x: x(0), width: x(cell.value) - x(0), y: 9, height: 8, rx: 2, fill: colour(cell.policy), opacity: 0.22 }),
      ends(cell) && s("path", { d: `M${x(cell.low)} 13H${x(cell.high)}M${x(cell.low)} 8.5v9M${x(cell.high)} 8.5v9`, stroke: colour(cell.policy), "stroke-width": 1.8, fill: "none" }),
      s("circle", { cx: x(cell.value), cy: 13, r: 3.6, fill: colour(cell.policy), class: "dot" }),
      seeds.map((seed) => s("path", { d: `M${x(seed.value)} 20v5`, stroke: colour(cell.policy), "stroke-width": 1.6 }, s("title", {}, `seed ${seed.seed}: ${fraction(seed.value)}`))));
  }

  // One sentence. It names a winner only where one system alone is best and above the reference by more than its
  // interval, and says who lies within the winner's interval, if there is one. Two seeds exclude next to nothing about
  // other seeds, whatever they show, so systems that are above in each of them are named as that.
  const listed = (names) => names.join(", ").replace(/, ([^,]*)$/, " and $1");
  function headline(scored) {
    const reference = scored.find((cell) => cell.policy === data.reference), others = scored.filter((cell) => cell !== reference);
    const count = data.asked, name = title(reference.policy);
    if (!others.length) return `${name} has exact match ${fraction(reference.value)} on ${count}.`;
    const gain = (cell, seed = "all") => find(cell.policy, data.gain, { seed });
    const isAbove = (found) => Boolean(found && ends(found) && found.low > 0);
    if (data.is_few && data.seeds.length > 1) {
      const above = others.filter((cell) => data.seeds.every((seed) => isAbove(gain(cell, String(seed)))));
      const where = `by more than the interval over questions alone in each of ${data.seeds.length} seeds`;
      if (!above.length) return `Nothing is above ${name} ${where}, on ${count}.`;
      return `${listed(above.map((cell) => title(cell.policy)))} ${above.length > 1 ? "are" : "is"} above ${name} ${where} (EM ${listed(above.map((cell) => signed(fraction(gain(cell).value))))}), on ${count}.`;
    }
    const above = others.filter((cell) => isAbove(gain(cell))).sort((a, b) => b.value - a.value);
    if (!above.length) return `Nothing is above ${name} by more than its interval, on ${count}.`;
    const best = above[0], shown = fraction(best.value), tied = others.filter((cell) => fraction(cell.value) === shown);
    if (tied.length > 1) return `${listed(tied.map((cell) => title(cell.policy)))} each have exact match ${shown} on ${count}; ${name} has ${fraction(reference.value)}.`;
    const near = ends(best) ? others.filter((cell) => cell !== best && cell.value >= best.low) : [];
    const who = near.length === 1 ? `${title(near[0].policy)} lies` : `${near.length} others lie`, close = near.length ? `; ${who} within its interval` : "";
    return `${title(best.policy)} has exact match ${shown} on ${count}, ${fraction(gain(best).value)} above ${name}${close}.`;
  }

  function results() {
    const scored = order.map((policy) => find(policy, "em")).filter(Boolean);
    main.append(h("h1", {}, headline(scored)));
    const facts = { ...data.facts, questions: data.num_questions.toLocaleString("en"), seeds: data.seeds.join(", ") };
    const commits = [...new Set(Object.values(data.provenance).flatMap((p) => p.stages.map((stage) => stage.ledger && stage.ledger.git_commit)).filter(Boolean))];
    if (commits.length) facts.commit = commits.map((commit) => commit.slice(0, 8)).join(", ");
    main.append(h("ul", { class: "facts" }, Object.entries(facts).map(([key, value]) => h("li", {}, h("b", {}, key), value))));
    data.notes.forEach((line) => main.append(h("p", { class: "warning" }, line)));

    // With too few seeds for an interval over them the paired difference stands first, and every seed is shown.
    const first = (em, gain) => (data.is_few ? [gain, em] : [em, gain]);
    const header = ["policy", h("span", { class: "left" }, "exact match, 0 to 1"), ...first("EM", `EM \u2212 ${title(data.reference)}`), "F1", "subEM", "sampled EM", "searches", "valid", "passage", "gold", "tokens"];
    const body = h("tbody");
    function draw(withSeeds) {
      body.replaceChildren();
      for (const policy of order) {
        for (const seed of ["all", ...(withSeeds ? data.seeds.map(String) : [])]) {
          const get = (metric, mode) => find(policy, metric, { seed, mode });
          const em = get("em");
          if (!em) continue;
          const dots = seed === "all" ? data.seeds.map((one) => find(policy, "em", { seed: String(one) })).filter(Boolean) : [];
          body.append(row([
            seed === "all" ? [swatch(policy), title(policy)] : `seed ${seed}`,
            h("td", { class: "left wide" }, intervalBar(em, dots)), ...first(share(em), difference(get(data.gain))), share(get("f1")), share(get("subem")), share(get("em", "sampled")),
            plain(get("searches"), 2), value(get("valid_action_rate")),
            value(get("answer_in_passage")), value(get("recall")), plain(get("generated_tokens"), 0),
          ].map((cell) => cell || h("td", {}, "\u2013")), { class: seed === "all" ? "" : "seedrow" }));
        }
      }
    }
    const showsSeeds = data.is_few && data.seeds.length > 1;
    draw(showsSeeds);
    const toggle = h("label", { class: "check" }, h("input", { type: "checkbox", checked: showsSeeds, onchange: (event) => draw(event.target.checked) }), "show each seed");
    const whole = scroller("Result table", h("table", { class: "tight" }, h("thead", {}, h("tr", {}, header.map((text) => h("th", { scope: "col" }, text)))), body));
    whole.querySelectorAll("th")[1].classList.add("left", "wide");
    sortable(whole);
    section("results", "Results", null, h("div", { class: "card" }, whole, h("div", { class: "bar" }, h("p", { class: "note" },
      `Greedy play; shares are fractions. Second line: 95% interval ${data.coverage}. Without one: none that would exclude anything.`, h("span", { class: "wide" }, " Ticks below a bar are single seeds."), ` Differences to ${title(data.reference)} are paired on seed and question. Valid: share of actions that could be executed. Passage: share of questions for which a returned passage holds the answer. Gold: share of gold passages found. Select a number to see where it comes from.`), h("span", { class: "space" }), toggle)));
    const failed = order.map((policy) => find(policy, "failed")).filter((cell) => cell && cell.value > 0);
    if (failed.length) main.lastChild.append(h("p", { class: "note down" }, `Failed searches: ${failed.map((cell) => `${title(cell.policy)} ${fraction(cell.value)} of questions`).join(", ")}. They count as wrong.`));
  }

  // Breakdown by hops or dataset

  function breakdown(key, values, name, lead, label) {
    const counts = values.map((value) => { const cell = find(order[0], "em", { [key]: value }); return cell ? `${cell.count} questions` : ""; });
    const longest = Math.max(...values.map((value, i) => Math.max(label(value).length, counts[i].length)));
    const width = narrow() ? 340 : 560, rowHeight = Math.max(34, 13 * order.length + 16), left = Math.max(narrow() ? 82 : 110, Math.min(width / 2, 16 + 6.6 * longest)), right = 16, top = 8, height = top + rowHeight * values.length + 26;
    const x = (value) => left + (width - left - right) * value;
    const marks = values.map((value, i) => {
      const y = top + i * rowHeight;
      return [
        i > 0 && s("line", { class: "gridline", x1: 0, x2: width, y1: y, y2: y }),
        s("text", { x: 0, y: y + rowHeight / 2 - 2, "font-weight": 600 }, label(value)), s("text", { x: 0, y: y + rowHeight / 2 + 12 }, counts[i]),
        order.map((policy, j) => {
          const cell = find(policy, "em", { [key]: value });
          if (!cell) return null;
          const cy = y + 14 + 13 * j;
          const hover = (event) => showTip(`${title(policy)}, ${label(value)}\nEM ${fraction(cell.value)}${ends(cell) ? `  [${ends(cell).map(fraction).join(", ")}]` : ""}\n${cell.count} questions`, event.clientX, event.clientY);
          return s("g", { onpointermove: hover, onpointerleave: hideTip },
            s("rect", { x: left, width: width - left - right, y: cy - 6.5, height: 13, fill: "transparent" }),
            ends(cell) && s("line", { x1: x(cell.low), x2: x(cell.high), y1: cy, y2: cy, stroke: colour(policy), "stroke-width": 3, "stroke-linecap": "round", opacity: 0.55 }),
            s("circle", { cx: x(cell.value), cy, r: 4.6, fill: colour(policy), class: "dot" }));
        }),
      ];
    });
    const base = top + rowHeight * values.length;
    const axis = [0, 0.25, 0.5, 0.75, 1].map((tick) => [s("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: top, y2: base }), s("text", { x: x(tick), y: base + 16, "text-anchor": "middle" }, tick)]);
    const plot = s("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Exact match ${name.toLowerCase()}, with intervals; the same numbers are in the table` }, axis, marks);
    const rows = values.map((value) => row([label(value), h("td", { class: "wide" }, String((find(order[0], "em", { [key]: value }) || {}).count ?? "")), ...order.map((policy) => share(find(policy, "em", { [key]: value })) || "\u2013")]));
    section(key, name, lead, h("div", { class: "grid two" }, h("div", { class: "card" }, legend(order), plot), h("div", { class: "card" }, table([key, h("span", { class: "wide" }, "questions"), ...order.map(title)], rows))));
  }
  // Every dataset and number of hops, in full.
  function parts() {
    const isLong = data.parts.length * order.length > 24;
    const state = { dataset: isLong ? data.parts[0][0] : "", hops: "", policy: "" };
    const shownName = (dataset) => (dataset === "all" ? data.dataset : dataset);
    const box = h("div");
    const header = ["policy", "EM", "F1", "passage", "gold", "searches", "written tokens", "read tokens"];
    function line([dataset, hops], policy) {
      const get = (metric) => find(policy, metric, { dataset, hops });
      if (!get("em")) return null;
      const rest = data.part_metrics.map((metric) => (["em", "f1", "answer_in_passage"].includes(metric) ? share(get(metric)) : metric === "recall" ? value(get(metric)) : plain(get(metric), metric === "searches" ? 2 : 0)) || "\u2013");
      return row([[swatch(policy), title(policy)], ...rest]);
    }
    function group([dataset, hops]) {
      const lines = order.filter((policy) => !state.policy || policy === state.policy).map((policy) => line([dataset, hops], policy)).filter(Boolean);
      const { count } = find(order[0], "em", { dataset, hops }) || { count: 0 };
      return [h("tr", { class: "part" }, h("th", { colspan: header.length, scope: "colgroup" }, `${shownName(dataset)}, ${hops} ${hops === "1" ? "hop" : "hops"}`, h("span", { class: "range" }, `${count} questions`))), ...lines];
    }
    function draw() {
      const chosen = data.parts.filter(([dataset, hops]) => (!state.dataset || dataset === state.dataset) && (!state.hops || hops === state.hops));
      box.replaceChildren(table(header, chosen.flatMap(group), { class: "tight" }));
    }
    const pick = (key, name, options) => options.length > 1 && h("label", { class: "field" }, name, h("select", { onchange: (event) => { state[key] = event.target.value; draw(); } }, [["", "all"], ...options].map(([value, text]) => h("option", { value, selected: value === state[key] }, text))));
    const unique = (place) => [...new Set(data.parts.map((part) => part[place]))];
    draw();
    section("parts", "By dataset and number of hops", `${data.part_lead} Seconds are known of whole evaluations and stand under Cost.`, h("div", { class: "card" }, h("div", { class: "bar" },
      pick("dataset", "Dataset", unique(0).map((one) => [one, shownName(one)])), pick("hops", "Hops", unique(1).map((one) => [one, one])), pick("policy", "Policy", order.map((one) => [one, title(one)]))), box));
  }

  // Wrong answers by kind, and some of them to read.

  const KIND_COLOUR = { failed: "var(--soft)", no_answer: "var(--p0)", near_miss: "var(--p5)", not_found: "var(--p1)", not_shown: "var(--p7)", not_read: "var(--p9)", unclear: "var(--p4)" };
  const kindName = (kind) => (data.errors.kinds.find((one) => one[0] === kind) || [kind, kind])[1];
  function errorBar(policy, shown) {
    const counts = data.errors.counts[policy], wrong = Object.values(counts).reduce((a, b) => a + b, 0), width = 1000, all = data.errors.num_answers;
    let at = width * (all - wrong) / all;
    const label = `${title(policy)}: ${wrong} of ${all} answers are wrong; ${shown.map((kind) => `${kindName(kind)} ${counts[kind]}`).join(", ")}`;
    return s("svg", { class: "errorbar", viewBox: `0 0 ${width} 20`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      s("rect", { x: 0, y: 0, width: at, height: 20, fill: "var(--faint)" }),
      shown.map((kind) => {
        const wide = width * counts[kind] / all, x = at;
        at += wide;
        const text = `${title(policy)}, ${kindName(kind)}: ${counts[kind]} of ${wrong} wrong answers (${fraction(wrong ? counts[kind] / wrong : 0)})`;
        return wide > 0 && s("rect", { x, y: 0, width: wide, height: 20, fill: KIND_COLOUR[kind], onpointermove: (event) => showTip(text, event.clientX, event.clientY), onpointerleave: hideTip });
      }));
  }
  function errorsSection(read) {
    const { kinds, counts, num_answers: all, sample } = data.errors;
    const shown = kinds.map((one) => one[0]).filter((kind) => order.some((policy) => counts[policy][kind]));
    if (!shown.length) return;
    const rows = order.map((policy) => {
      const wrong = Object.values(counts[policy]).reduce((a, b) => a + b, 0);
      return row([[swatch(policy), title(policy)], wrong.toLocaleString("en"), ...shown.map((kind) => h("td", {}, counts[policy][kind].toLocaleString("en"), h("span", { class: "range" }, wrong ? fraction(counts[policy][kind] / wrong) : "")))]);
    });
    const kindSwatch = (kind) => h("span", { class: "swatch", "--c": KIND_COLOUR[kind] });
    section("errors", "Errors by kind", `Wrong answers in greedy play, all seeds together: ${all.toLocaleString("en")} answers of each policy. A kind follows from what the searches returned and what was answered; the first that applies counts. Shares are of the wrong answers.`,
      h("div", { class: "grid" },
        h("div", { class: "card" }, h("div", { class: "legend" }, h("span", {}, h("span", { class: "swatch", "--c": "var(--faint)" }), "right"), shown.map((kind) => h("span", {}, kindSwatch(kind), kindName(kind)))),
          h("div", { class: "errorbars" }, order.map((policy) => [h("span", {}, title(policy)), errorBar(policy, shown)])),
          sortable(table(["policy", "wrong", ...shown.map(kindName)], rows)),
          h("details", {}, h("summary", {}, "What the kinds mean"), pairs(kinds.filter(([kind]) => shown.includes(kind)).map(([, name, meaning]) => [name, meaning])))),
        sample.length > 0 && errorList(sample, kindSwatch, read)));
  }
  function errorList(sample, kindSwatch, read) {
    const policies = order.filter((policy) => sample.some((one) => one.policy === policy));
    const list = h("ol", { class: "errors" }), lead = h("p", { class: "note" });
    const said = (one) => (one.answer === null ? h("i", {}, "nothing") : h("q", {}, one.answer));
    function item(one) {
      const target = one.is_recorded && data.trajectories.find((t) => t.policy === one.policy && t.seed === one.seed && t.question_id === one.question_id && t.mode === "greedy" && t.step === null);
      return h("li", {}, h("p", { class: "asked" }, one.question),
        h("p", {}, "Said ", said(one), ", expected ", one.answers.slice(0, 3).map((answer, i) => [i > 0 && " or ", h("q", {}, answer)]), "."),
        h("p", { class: "facts-line" }, h("span", {}, kindSwatch(one.kind), kindName(one.kind)), h("span", {}, `${one.searches} ${one.searches === 1 ? "search" : "searches"}`), h("span", {}, one.dataset), h("span", {}, `${one.hops} ${one.hops === 1 ? "hop" : "hops"}`), h("span", {}, `seed ${one.seed}`),
          target ? h("button", { class: "link", onclick: () => read(target), "aria-label": `Read the trajectory of: ${one.question}` }, "read it") : h("span", {}, "trajectory not recorded: ", h("code", {}, `artifacts/evaluate/${one.policy}-${one.seed}/scores.jsonl`), " has its scores")));
    }
    function draw(policy) {
      const own = sample.filter((one) => one.policy === policy);
      lead.textContent = `${own.length} wrong answers of ${title(policy)}, one of each kind in turn, so their numbers say nothing about shares.`;
      list.replaceChildren(...own.map(item));
    }
    draw(policies[policies.length - 1]);
    const select = h("select", { onchange: (event) => draw(event.target.value) }, policies.map((policy) => h("option", { value: policy }, title(policy))));
    select.value = policies[policies.length - 1];
    return h("details", { class: "card" }, h("summary", {}, "Read wrong answers"), h("div", { class: "bar" }, h("label", { class: "field" }, "Policy", select)), lead, list);
  }

  const legend = (policies, extra) => h("div", { class: "legend" }, policies.map((policy) => h("span", {}, swatch(policy), title(policy))), extra);

  // Line charts

  // Drawn narrower on a phone, so that the labels stay readable.
  function narrow() { return innerWidth < 600; }

  function ticks(low, high, count = 4) {
    const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((candidate) => candidate >= raw);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(i * step);
    return found;
  }
  // The label of a tick: as many digits as tell it from its neighbours.
  function tickText(tick, marks) {
    const step = marks.length > 1 ? marks[1] - marks[0] : Math.abs(tick);
    const digits = [0, 1, 2, 3, 4, 5].find((d) => Math.abs(step * 10 ** d - Math.round(step * 10 ** d)) < 1e-6 * step * 10 ** d);
    return digits === undefined || Math.max(...marks.map(Math.abs)) >= 1e3 ? brief(tick) : (Math.abs(tick) < step / 2 ? 0 : tick).toFixed(digits);
  }
  function smoothed(points, window) {
    if (window < 2) return points;
    return points.map(([x], i) => {
      const near = points.slice(Math.max(0, i - window), i + window + 1);
      return [x, near.reduce((sum, p) => sum + p[1], 0) / near.length];
    });
  }
  // One line a seed and their mean, for each policy. x is a column of the metrics.
  function seriesOf(policies, metric, xColumn, window, curves = data.curves) {
    return policies.map((policy) => {
      const seeds = Object.entries(curves[policy] || {}).map(([seed, curve]) => {
        const xs = curve[xColumn] || curve.step, ys = curve[metric] || [];
        return { seed, steps: curve.step, points: smoothed(xs.map((x, i) => [x, ys[i], curve.step[i]]).filter((p) => known(p[0]) && known(p[1])), window) };
      }).filter((one) => one.points.length);
      const at = new Map();
      for (const one of seeds) {
        const curve = curves[policy][one.seed];
        curve.step.forEach((step, i) => {
          const x = (curve[xColumn] || curve.step)[i], y = (curve[metric] || [])[i];
          if (!known(x) || !known(y)) return;
          if (!at.has(step)) at.set(step, []);
          at.get(step).push([x, y]);
        });
      }
      const mean = [...at].filter(([, found]) => found.length === seeds.length).sort((a, b) => a[0] - b[0])
        .map(([, found]) => [0, 1].map((axis) => found.reduce((sum, point) => sum + point[axis], 0) / found.length));
      return { policy, seeds, mean: smoothed(mean, window) };
    }).filter((one) => one.seeds.length);
  }
  function chart({ series, dots = [], width = narrow() ? 330 : 480, height = narrow() ? 220 : 250, zero = false, cap = null, diagonal = false, xName, format = short, label }) {
    const left = 44, right = 14, top = 10, bottom = xName ? 36 : 22;
    const all = [...series.flatMap((one) => one.seeds.flatMap((seed) => seed.points)), ...dots.flatMap((one) => one.points)];
    if (!all.length) return h("p", { class: "empty" }, "Nothing recorded.");
    const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (zero) y0 = Math.min(0, y0);
    if (y1 - y0 < 1e-12) { y1 += Math.abs(y1) * 0.1 || 1; y0 -= zero ? 0 : Math.abs(y0) * 0.1; }
    y1 += (y1 - y0) * 0.06;
    if (cap !== null && y1 > cap && Math.max(...ys) <= cap) y1 = cap;
    const px = (x) => left + (width - left - right) * (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5);
    const py = (y) => top + (height - top - bottom) * (1 - (y - y0) / (y1 - y0));
    const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)} ${py(p[1]).toFixed(1)}`).join("");
    const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    const yTicks = ticks(y0, y1), xTicks = ticks(x0, x1, width > 400 ? 5 : 4);
    const node = s("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      yTicks.map((tick) => [s("line", { class: "gridline", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), s("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end", class: "ytick" }, tickText(tick, yTicks))]),
      xTicks.map((tick) => s("text", { x: px(tick), y: height - bottom + 16, "text-anchor": "middle" }, tickText(tick, xTicks))),
      s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
      diagonal && s("line", { class: "diagonal", x1: px(Math.max(x0, y0)), y1: py(Math.max(x0, y0)), x2: px(Math.min(x1, y1)), y2: py(Math.min(x1, y1)) }),
      xName && s("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, xName),
      series.map((one) => one.band && s("path", { class: "band", d: `${path(one.band)}Z`, fill: colour(one.policy) })),
      series.map((one) => one.seeds.length > 1 && one.seeds.map((seed) => s("path", { class: "seed", d: path(seed.points), stroke: colour(one.policy) }))),
      series.map((one) => s("path", { class: "mean", d: path(one.mean.length ? one.mean : one.seeds[0].points), stroke: colour(one.policy) })),
      dots.map((one) => one.seeds.map((seed) => s("path", { class: "between", d: path(seed.points), stroke: colour(one.policy) }))),
      dots.map((one) => one.points.map((p) => s("circle", { cx: px(p[0]), cy: py(p[1]), r: 3.4, class: "dot", fill: colour(one.policy) }))), cross);
    const nearest = (points, x) => points.reduce((found, p) => (!found || Math.abs(p[0] - x) < Math.abs(found[0] - x) ? p : found), null);
    node.addEventListener("pointermove", (event) => {
      const box = node.getBoundingClientRect();
      const x = x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
      if (x < x0 - (x1 - x0) * 0.02 || x > x1 + (x1 - x0) * 0.02) { hideTip(); cross.setAttribute("visibility", "hidden"); return; }
      cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x)); cross.setAttribute("visibility", "visible");
      const lines = series.map((one) => {
        const mean = nearest(one.mean.length ? one.mean : one.seeds[0].points, x);
        const each = one.seeds.length > 1 ? `  (${one.seeds.map((seed) => format(nearest(seed.points, x)[1])).join(", ")})` : "";
        return `${title(one.policy)}  ${format(mean[1])}${each}`;
      });
      dots.forEach((one) => { const near = nearest(one.points, x); if (near) lines.push(`${title(one.policy)} validation  ${format(near[1])}  at ${short(near[0])}`); });
      showTip([`${xName || "step"} ${short(x)}`, ...lines].join("\n"), event.clientX, event.clientY);
    });
    node.addEventListener("pointerleave", () => { hideTip(); cross.setAttribute("visibility", "hidden"); });
    return node;
  }
  function validationDots(policies, xColumn) {
    return seriesOf(policies, "validation_em", xColumn, 0).map((one) => ({ policy: one.policy, seeds: one.seeds, points: one.seeds.flatMap((seed) => seed.points) }));
  }

  const trained = order.filter((policy) => Object.keys(data.curves[policy] || {}).length);
  const has = (policies, metric, curves = data.curves) => policies.some((policy) => Object.values(curves[policy] || {}).some((curve) => (curve[metric] || []).some(known)));

  function segmented(options, chosen, onchange, label) {
    const buttons = options.map(([value, text]) => h("button", { "aria-pressed": String(value === chosen), onclick: () => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
      onchange(value);
    } }, text));
    return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
  }

  function learning() {
    const state = { x: "generated_tokens_total", window: 0 };
    const panels = h("div", { class: "grid two" });
    function draw() {
      const xName = state.x === "step" ? "RL steps" : "generated tokens";
      const make = (name, metric, dots) => h("div", { class: "card" }, h("h3", {}, name), chart({ series: seriesOf(trained, metric, state.x, state.window), dots, zero: true, cap: 1, xName, label: `${name} against ${xName}`, format: (v) => v.toFixed(2) }));
      panels.replaceChildren(make("Mean reward of the rollouts", "reward_mean", []), make("Exact match: rollouts (lines) and validation (dots, a dashed line for each seed)", "em_mean", validationDots(trained, state.x)));
    }
    draw();
    section("learning", "Learning curves", "Thin lines are seeds, the thick line is their mean. Dots are greedy play on held-back validation questions; a dashed line connects those of one seed.",
      h("div", { class: "bar" }, legend(trained), h("span", { class: "space" }),
        h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => { state.window = event.target.checked ? 3 : 0; draw(); } }), "smooth over 7 points"),
        segmented([["generated_tokens_total", "by generated tokens"], ["step", "by steps"]], state.x, (x) => { state.x = x; draw(); }, "Horizontal axis")),
      panels);
  }

  const HEALTH = [
    ["entropy", "Entropy", "nats a token"], ["kl", "KL to the start policy", "nats a token"], ["approx_kl", "KL of an update", "nats a token, from the policy that played"], ["share_with_signal", "Groups with a signal", "share with both outcomes"], ["num_searches", "Searches", "per trajectory"],
    ["clip_fraction", "Clip fraction", "share of tokens"], ["grad_norm", "Gradient norm", "before clipping"], ["logprob_gap_mean", "Logprob gap, mean", "generator against trainer"], ["logprob_gap_max", "Logprob gap, largest", "generator against trainer"],
    ["ratio_mean", "Importance ratio", "mean"], ["loss", "Policy loss", ""], ["value_loss", "Value loss", "PPO"], ["valid_action_rate", "Valid actions", "share"],
    ["response_tokens", "Response length", "tokens"], ["truncated_rate", "Cut off", "share"], ["failed", "Failed trajectories", "count"],
  ];
  function health() {
    const panels = HEALTH.filter(([metric]) => has(trained, metric)).map(([metric, name, unit]) => h("div", { class: "card" }, h("h3", {}, name, unit && [" ", h("span", { class: "range" }, unit)]),
      chart({ series: seriesOf(trained, metric, "step", 0), width: 280, height: 150, zero: !["ratio_mean", "loss"].includes(metric), label: `${name} against steps` })));
    const making = { start: data.start_curves }, [first] = Object.values(data.start_curves);
    const names = first ? Object.keys(first).filter((name) => name !== "step" && has(["start"], name, making)) : [];
    section("health", "Training health", "Against RL steps, each one batch of rollouts. A healthy run keeps entropy above zero, KL bounded, groups with a signal, and a logprob gap near zero.", legend(trained), h("div", { class: "grid many" }, panels),
      names.length > 0 && h("details", {}, h("summary", {}, "How the start policy was made"), h("div", { class: "grid many" }, names.map((name) => h("div", { class: "card" }, h("h3", {}, name.replaceAll("_", " ")),
        chart({ series: seriesOf(["start"], name, "step", 0, making), width: 280, height: 150, zero: true, label: `start policy: ${name} against steps` }))))));
  }

  // Trajectory viewer

  const TAGS = ["think", "search", "answer", "information", "evidence", "original_evidence", "tool_call"];
  // Split the policy's tokens into blocks by tag pair; a token belongs to the block in which its first visible character
  // lies: many tokenizers put the space before a tag into the tag's token.
  function blocksOf(turn) {
    const text = turn.pieces.join("");
    const spans = [];
    const pattern = new RegExp(`<(${TAGS.join("|")})>[\\s\\S]*?(?:</\\1>|$)`, "g");
    for (let match = pattern.exec(text); match; match = pattern.exec(text)) spans.push([match.index, match.index + match[0].length, match[1]]);
    const blocks = [];
    let offset = 0;
    turn.pieces.forEach((token, i) => {
      const at = offset + Math.max(0, token.search(/\S/));
      const span = spans.find(([start, end]) => at >= start && at < end);
      const kind = span ? span[2] : "other", key = span ? span[0] : -1;
      const last = blocks[blocks.length - 1];
      if (last && last.key === key) last.tokens.push(i);
      else if (kind === "other" && !token.trim() && last) last.tokens.push(i);
      else blocks.push({ kind, key, tokens: [i] });
      offset += token.length;
    });
    return blocks;
  }
  const BLOCK_NAME = { think: "think", search: "search", answer: "answer", other: "outside any tag", information: "written by the policy, not retrieved", original_evidence: "evidence" };

  // What the parts of a method noted beside the turns of a trajectory; turn -1 is the question.

  const notesAt = (t, k) => (t.notes || []).filter((note) => note.turn === k);
  const isNumberAlone = (note) => known(note.value) && !note.text && note.taken === undefined;
  // One curve for each name with values at two places or more; alternatives are shown at their turn.
  function noteCurves(t) {
    const names = [...new Set((t.notes || []).map((note) => note.name))];
    const drawn = names.map((name) => {
      const at = new Map((t.notes || []).filter((note) => note.name === name && known(note.value) && note.taken === undefined).map((note) => [note.turn, note.value]));
      return { name, points: [...at].sort((a, b) => a[0] - b[0]) };
    }).filter((one) => one.points.length > 1);
    return drawn.length > 0 && h("div", { class: "curves" }, drawn.map((one) => h("figure", {}, h("figcaption", {}, `${one.name} over the turns`), noteCurve(one, t.turns.length))));
  }
  function noteCurve({ name, points }, numTurns) {
    const width = 320, height = 110, left = 34, right = 12, top = 12, bottom = 22;
    const values = points.map((point) => point[1]), first = points[0][0] < 0 ? -1 : 0;
    const isShare = Math.min(...values) >= 0 && Math.max(...values) <= 1;
    let [low, high] = isShare ? [0, 1] : [Math.min(...values), Math.max(...values)];
    if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
    const px = (turn) => left + (width - left - right) * (numTurns - 1 > first ? (turn - first) / (numTurns - 1 - first) : 0.5);
    const py = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
    const placeName = (turn) => (turn < 0 ? "question" : `turn ${turn + 1}`);
    const stride = Math.ceil((numTurns - first) / 8);
    const label = `${name}: ${points.map(([turn, value]) => `${placeName(turn)} ${short(value)}`).join(", ")}`;
    return s("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      [low, (low + high) / 2, high].map((value) => [s("line", { class: "gridline", x1: left, x2: width - right, y1: py(value), y2: py(value) }), s("text", { x: left - 5, y: py(value) + 4, "text-anchor": "end" }, brief(value))]),
      Array.from({ length: numTurns - first }, (_, i) => i + first).filter((turn, i) => i % stride === 0).map((turn) => s("text", { x: px(turn), y: height - 6, "text-anchor": "middle" }, turn < 0 ? "Q" : turn + 1)),
      s("path", { class: "mean", d: points.map(([turn, value], i) => `${i ? "L" : "M"}${px(turn).toFixed(1)} ${py(value).toFixed(1)}`).join(""), stroke: "var(--accent)" }),
      points.map(([turn, value]) => s("circle", { cx: px(turn), cy: py(value), r: 3.6, class: "dot", fill: "var(--accent)",
        onpointerenter: (event) => showTip(`${name} at ${placeName(turn)}: ${value}`, event.clientX, event.clientY), onpointerleave: hideTip })));
  }
  function noted(t, k) {
    const notes = notesAt(t, k).filter((note) => !isNumberAlone(note));
    const choices = notes.filter((note) => note.taken !== undefined).sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
    const others = notes.filter((note) => note.taken === undefined);
    const value = (note) => known(note.value) && h("span", { class: `value ${note.value > 0 ? "up" : note.value < 0 ? "down" : ""}` }, short(note.value));
    return [
      others.length > 0 && h("div", { class: "block noted" }, h("h4", {}, "notes"), others.map((note) => h("p", { class: "remark" }, h("b", {}, note.name), " ", value(note), note.text && ` ${note.text}`))),
      choices.length > 0 && h("div", { class: "block choices" }, h("h4", {}, `${choices.length} ${choices.length === 1 ? "candidate" : "candidates"} for this turn`),
        choices.map((note) => h("div", { class: note.taken ? "choice taken" : "choice" }, h("span", { class: "fate" }, note.taken ? "taken" : "not taken"), value(note), h("span", { class: "plain" }, note.text || note.name)))),
    ];
  }

  // Evidence beside the passages it came from: words of one that stand in the other are marked.

  const LONG = 240;  // Characters of a passage that is shown whole.
  const EVIDENCE = ["evidence", "original_evidence"];
  const FILLERS = new Set("a an and are as at by for from in into is it its of on or that the their this to was were which with".split(" "));
  const wordsOf = (text) => [...text.matchAll(/[\p{L}\p{N}]+/gu)].map((match) => ({ word: match[0].toLowerCase(), start: match.index, end: match.index + match[0].length })).filter(({ word }) => !FILLERS.has(word));
  // Places [start, end) of the words of a text that stand in `words`.
  const placesOf = (text, words) => wordsOf(text).filter(({ word }) => words.has(word));
  function withMarks(text, places) {
    const parts = [];
    let at = 0;
    for (const { start, end, kind } of places) { parts.push(text.slice(at, start), h("mark", { class: kind }, text.slice(start, end))); at = end; }
    return [...parts, text.slice(at)];
  }
  // Places of answers as whole words, by the rules of tasks/text.py: without case, ASCII punctuation and articles.
  const PUNCTUATION = /[!-/:-@[-`{-~]/g, EDGES = /^[!-/:-@[-`{-~]*|[!-/:-@[-`{-~]*$/g;
  function answerPlaces(text, answers, kind) {
    if (!answers.length) return [];
    const words = [...text.matchAll(/\S+/g)].map((match) => {
      const [before, after] = [...match[0].matchAll(EDGES)].map((edge) => edge[0].length);
      return { word: match[0].toLowerCase().replace(PUNCTUATION, ""), start: match.index + before, end: match.index + match[0].length - (after || 0) };
    }).filter(({ word }) => word && !["a", "an", "the"].includes(word));
    return answers.map((answer) => answer.split(" ")).flatMap((wanted) => words.flatMap((first, i) => (wanted.every((word, k) => words[i + k] && words[i + k].word === word) ? [{ start: first.start, end: words[i + wanted.length - 1].end, kind }] : [])));
  }
  // Where gold answers and the given one stand in a text; where two overlap, the first and longest counts.
  function answersIn(text, t) {
    const found = [...answerPlaces(text, t.gold_words, "expected"), ...(t.is_right ? [] : answerPlaces(text, t.said_words, "given"))];
    found.sort((a, b) => a.start - b.start || b.end - a.end);
    return found.filter((place, i) => place.end > place.start && found.slice(0, i).every((other) => other.end <= place.start));
  }
  const markedText = (text, words) => withMarks(text, placesOf(text, words));
  // What a policy had read before turn k.
  const readBefore = (t, k) => t.turns.slice(0, k).flatMap((turn, i) => (turn.hits.length ? turn.hits.map((hit) => ({ turn: i, title: hit.title, text: hit.text })) : turn.executed && turn.observation.trim() ? [{ turn: i, title: "environment", text: turn.observation.trim() }] : []));
  function sourcesOf(t, k, evidence) {
    const words = new Set(wordsOf(evidence).map(({ word }) => word));
    const sources = readBefore(t, k).map((source) => { const own = new Set(wordsOf(`${source.title} ${source.text}`).map(({ word }) => word)); return { ...source, share: [...words].filter((word) => own.has(word)).length / Math.max(words.size, 1) }; });
    const best = sources.filter((source) => source.share >= 0.25).sort((a, b) => b.share - a.share).slice(0, 3);
    return h("div", { class: "block information sources" }, h("h4", {}, "where its words stand"), best.length ? best.map((source) => h("div", { class: "doc" }, h("b", {}, markedText(source.title, words)), h("span", { class: "meta" }, `turn ${source.turn + 1}, ${fraction(source.share)} of its words`), h("p", {}, markedText(source.text, words)))) : h("p", { class: "plain" }, words.size ? "In no passage that was read: fewer than a quarter of its words." : "The evidence is empty."));
  }

  function viewer() {
    const rows = data.trajectories;
    if (!rows.length) return () => {};
    for (const t of rows) {
      if (t.step !== null) t.mode = "training";
      // A system without tokens leaves text, which is cut at its tags.
      for (const turn of t.turns) turn.pieces = turn.tokens || turn.text.split(/(<\/?\w+>)/).filter(Boolean);
    }
    const modes = [...new Set(rows.map((t) => t.mode))];
    const hops = [...new Set(rows.map((t) => t.hops))].sort((a, b) => a - b);
    const best = order.filter((policy) => find(policy, "em")).sort((a, b) => find(b, "em").value - find(a, "em").value)[0] || order[0];
    const state = { policy: rows.some((t) => t.policy === best) ? best : "", seed: "", mode: modes.includes("greedy") ? "greedy" : modes[0], outcome: "", hops: hops.length ? String(hops[hops.length - 1]) : "", shade: "auto", at: 0 };
    const selects = {};
    const play = h("div", { class: "play", "aria-live": "polite", tabindex: -1 });
    const count = h("span", { class: "count" });
    const back = h("button", { "aria-label": "Previous question", onclick: () => move(-1) }, "\u2190 Previous");
    const next = h("button", { "aria-label": "Next question", onclick: () => move(1) }, "Next \u2192");

    const matches = () => rows.filter((t) => (!state.policy || t.policy === state.policy) && (state.seed === "" || String(t.seed) === state.seed) && (!state.mode || t.mode === state.mode)
      && (!state.outcome || (state.outcome === "right") === t.is_right) && (!state.hops || String(t.hops) === state.hops));
    function choose(key, name, options) {
      selects[key] = h("select", { onchange: (event) => { state[key] = event.target.value; state.at = 0; draw(); } }, options.map(([value, text]) => h("option", { value }, text)));
      selects[key].value = state[key];
      return h("label", { class: "field" }, name, selects[key]);
    }
    // What a reader sees first: a right answer that only a later search found, of as many hops as there are.
    function telling() {
      const candidates = rows.filter((t) => (!state.policy || t.policy === state.policy) && t.mode === state.mode);
      const holds = (t, turns) => turns.some((turn) => turn.hits.some((hit) => answerPlaces(`${hit.title} ${hit.text}`, t.gold_words).length));
      const worth = (t) => {
        const searches = t.turns.filter((turn) => turn.executed);
        return [t.is_right, searches.length > 1, holds(t, searches.slice(1)) && !holds(t, searches.slice(0, 1)), t.hops].map(Number);
      };
      const ahead = ([x], [y]) => { const i = x.findIndex((value, k) => value !== y[k]); return i < 0 ? 0 : y[i] - x[i]; };
      return (candidates.map((t) => [worth(t), t]).sort(ahead)[0] || [])[1];
    }
    function move(by) {
      const total = matches().length;
      const to = Math.min(total - 1, Math.max(0, state.at + by));
      if (to !== state.at) { state.at = to; draw(); }
    }
    function jump(target) {
      Object.assign(state, { policy: target.policy, seed: String(target.seed), mode: target.mode, outcome: "", hops: String(target.hops) });
      for (const key of Object.keys(selects)) selects[key].value = state[key];
      state.at = Math.max(0, matches().indexOf(target));
      draw();
    }
    function draw() {
      const found = matches();
      count.textContent = found.length ? `${state.at + 1} of ${found.length}` : "none";
      back.disabled = state.at <= 0; next.disabled = state.at >= found.length - 1;
      hideTip();
      play.replaceChildren(found.length ? trajectory(found[state.at]) : h("p", { class: "empty" }, "No embedded trajectory matches. Widen a filter: the page holds a sample of each run."));
    }
    function shadeOf(t) {
      const trainedTurn = t.turns.some((turn) => turn.advantages);
      return state.shade === "auto" ? (trainedTurn ? "advantage" : "none") : state.shade;
    }
    function tokens(turn, indices, t, scale, words) {
      const shade = shadeOf(t);
      const places = words ? placesOf(turn.pieces.join(""), words) : [];
      const starts = turn.pieces.reduce((all, piece) => [...all, all[all.length - 1] + piece.length], [0]);
      const box = h("div", { class: "tokens" });
      let tag = false;
      for (const i of indices) {
        const token = turn.pieces[i];
        const advantage = turn.advantages && turn.advantages[i], logprob = turn.logprobs && turn.logprobs[i];
        let background = null;
        if (shade === "advantage" && known(advantage) && scale > 0) background = `rgba(var(--${advantage >= 0 ? "plus" : "minus"}), ${(0.72 * Math.min(1, Math.abs(advantage) / scale)).toFixed(3)})`;
        if (shade === "surprise" && known(logprob)) background = `rgba(var(--minus), ${(0.72 * Math.min(1, -logprob / 4)).toFixed(3)})`;
        tag = /^\s*<\/?\w+>\s*$/.test(token);
        // A word may be a part of a token or run over several.
        const lead = i === indices[0] ? token.search(/\S|$/) : 0;  // A block does not begin with a blank line.
        const inside = tag ? [] : places.filter(({ start, end }) => start < starts[i + 1] && end > starts[i]).map(({ start, end }) => ({ start: Math.max(start - starts[i] - lead, 0), end: end - starts[i] - lead }));
        const span = h("span", { class: tag ? (background ? "tag shaded" : "tag") : null, background, "data-i": i }, withMarks(token.slice(lead), inside));
        box.append(span);
      }
      box.addEventListener("pointermove", (event) => {
        const token = event.target.closest && event.target.closest("[data-i]");
        const i = token && token.getAttribute("data-i");
        if (i === null || i === undefined || !turn.tokens) { hideTip(); return; }
        const advantage = turn.advantages && turn.advantages[i], logprob = turn.logprobs && turn.logprobs[i];
        showTip([`token ${JSON.stringify(turn.tokens[i])}`, known(advantage) ? `advantage ${advantage.toFixed(4)}` : null, known(logprob) ? `logprob ${logprob.toFixed(4)}  (p = ${Math.exp(logprob).toFixed(3)})` : null].filter(Boolean).join("\n"), event.clientX, event.clientY);
      });
      box.addEventListener("pointerleave", hideTip);
      return box;
    }
    // A long passage is folded, unless it holds an answer.
    function passage(hit, t) {
      const inTitle = answersIn(hit.title, t), inText = answersIn(hit.text, t), has = (kind) => [...inTitle, ...inText].some((place) => place.kind === kind);
      const isLong = hit.text.length > LONG, isOpen = !isLong || has("expected");
      const body = h("p", { class: isOpen ? "" : "folded" }, withMarks(hit.text, inText));
      const toggle = isLong && h("button", { class: "link", "aria-expanded": String(isOpen), onclick: () => {
        const folded = body.classList.toggle("folded");
        toggle.setAttribute("aria-expanded", String(!folded));
        toggle.textContent = folded ? "whole passage" : "fold";
      } }, isOpen ? "fold" : "whole passage");
      return h("div", { class: "doc" }, hit.is_gold && h("span", { class: "gold" }, "gold"), has("expected") && h("span", { class: "holds" }, "holds the answer"), h("b", {}, withMarks(hit.title, inTitle)),
        h("span", { class: "meta" }, `${hit.passage_id}, score ${short(hit.score)}`), body, toggle);
    }
    function retrieved(turn, t) {
      if (turn.hits.length) {
        return h("div", { class: "block information" }, h("h4", {}, "information"), turn.hits.map((hit) => passage(hit, t)),
          turn.observation.trim() && h("details", {}, h("summary", {}, "What the policy was shown of these passages, which is less"), h("p", { class: "plain" }, withMarks(turn.observation.trim(), answersIn(turn.observation.trim(), t)))));
      }
      return turn.observation.trim() ? h("div", { class: `block ${turn.kind === "invalid" ? "invalid" : "information"}` }, h("h4", {}, "environment"), h("p", { class: "plain" }, turn.observation.trim())) : null;
    }
    // A grammar without a tag for thoughts leaves them outside any tag.
    const isThought = (t, turn, block) => block.kind === "other" && turn.kind !== "invalid" && !t.turns.some((one) => blocksOf(one).some((other) => other.kind === "think"));
    function written(t, k, block, scale) {
      const turn = t.turns[k], thinks = isThought(t, turn, block), name = thinks ? "thought" : BLOCK_NAME[block.kind] || block.kind;
      const isEvidence = EVIDENCE.includes(block.kind);
      const words = isEvidence && new Set(readBefore(t, k).flatMap((source) => wordsOf(`${source.title} ${source.text}`).map(({ word }) => word)));
      const kind = thinks ? "think" : ["think", "search", "answer"].includes(block.kind) ? block.kind : isEvidence ? "evidence" : "other";
      const box = h("div", { class: `block ${kind}` }, h("h4", {}, name), tokens(turn, block.tokens, t, scale, words));
      const text = block.tokens.map((i) => turn.pieces[i]).join("").replace(/<\/?\w+>/g, "");
      return isEvidence ? h("div", { class: "beside" }, box, sourcesOf(t, k, text)) : box;
    }
    function trajectory(t) {
      const scale = Math.max(0, ...t.turns.flatMap((turn) => (turn.advantages || []).filter(known).map(Math.abs)));
      const goldIds = new Set(t.gold_passage_ids), seen = new Set(t.turns.flatMap((turn) => turn.hits.map((hit) => hit.passage_id)).filter((id) => goldIds.has(id)));
      const shade = shadeOf(t);
      const turns = t.turns.map((turn, k) => {
        const advantages = (turn.advantages || []).filter(known);
        return h("div", { class: "turn" },
          h("aside", {}, h("strong", {}, `Turn ${k + 1}`), h("div", {}, turn.kind), t.step !== null && h("div", { class: turn.reward > 0 ? "up" : turn.reward < 0 ? "down" : "" }, `reward ${short(turn.reward)}`),
            advantages.length > 0 && h("div", {}, `adv. ${signed((advantages.reduce((a, b) => a + b, 0) / advantages.length).toFixed(2))}`), turn.tokens && h("div", {}, `${turn.tokens.length} tokens`),
            notesAt(t, k).filter(isNumberAlone).map((note) => h("div", {}, `${note.name} ${short(note.value)}`))),
          h("div", {}, blocksOf(turn).map((block) => written(t, k, block, scale)), noted(t, k), retrieved(turn, t)));
      });
      const siblings = rows.filter((other) => other !== t && other.question_id === t.question_id).slice(0, 12);
      return h("article", {},
        h("p", { class: "question" }, t.question),
        h("div", { class: "verdict" },
          h("span", { class: `pill ${t.is_right ? "good" : "bad"}` }, `${t.is_right ? "\u2713 right" : "\u2717 wrong"}`), h("span", { class: "pill" }, `outcome ${short(t.outcome)}`),
          h("span", { class: "pill" }, "said: ", t.answer === null ? "nothing" : t.is_right || !t.said_words.length ? t.answer : h("mark", { class: "given" }, t.answer)),
          h("span", { class: "pill" }, "expected: ", t.gold_words.length ? h("mark", { class: "expected" }, t.answers[0]) : t.answers[0], t.answers.slice(1, 3).map((answer) => ` / ${answer}`), t.answers.length > 3 && ` and ${t.answers.length - 3} more`),
          goldIds.size > 0 && h("span", { class: "pill" }, `found ${seen.size} of ${goldIds.size} gold passages`), t.status !== "answered" && h("span", { class: "pill bad" }, t.status),
          h("span", { class: "range" }, [title(t.policy), `seed ${t.seed}`, t.step !== null ? `step ${t.step}` : t.mode, t.dataset, `${t.hops} ${t.hops === 1 ? "hop" : "hops"}`, t.question_id].join(" \u00b7 "))),
        shade === "advantage" && scale > 0 && h("div", { class: "scale" }, `advantage ${signed((-scale).toFixed(2))}`, h("i", { class: "advantage" }), signed(scale.toFixed(2))),
        shade === "surprise" && h("div", { class: "scale" }, "certain", h("i", { class: "surprise" }), "surprising (p < 0.02)"),
        t.prompt !== null && h("details", {}, h("summary", {}, "Prompt"), h("div", { class: "block prompt" }, h("p", { class: "plain" }, t.prompt))), noteCurves(t), noted(t, -1), turns,
        siblings.length > 0 && h("div", { class: "siblings" }, "Same question:", siblings.map((other) => h("button", { onclick: () => jump(other) }, swatch(other.policy),
          `${title(other.policy)}, seed ${other.seed}, ${other.step !== null ? `step ${other.step}` : other.mode} ${other.is_right ? "\u2713" : "\u2717"}`))));
    }

    const first = telling();
    if (first) state.hops = String(first.hops);
    state.at = Math.max(0, matches().indexOf(first));
    const policies = order.filter((policy) => rows.some((t) => t.policy === policy));
    const node = section("trajectories", "Trajectories", "Read what a policy wrote, turn by turn, and what the search engine answered. Arrow keys step through the questions; choose mode \u201ctraining\u201d to see each token's advantage as colour.",
      h("div", { class: "card viewer", tabindex: -1 }, h("div", { class: "controls" },
        choose("policy", "Policy", [["", "all"], ...policies.map((policy) => [policy, title(policy)])]), choose("seed", "Seed", [["", "all"], ...data.seeds.map((seed) => [String(seed), String(seed)])]),
        choose("mode", "Mode", [["", "all"], ...modes.map((mode) => [mode, mode])]), choose("outcome", "Outcome", [["", "all"], ["right", "right"], ["wrong", "wrong"]]),
        choose("hops", "Hops", [["", "all"], ...hops.map((hop) => [String(hop), String(hop)])]), choose("shade", "Colour", [["auto", "auto"], ["none", "none"], ["advantage", "advantage"], ["surprise", "surprise"]]),
        h("div", { class: "stepper" }, back, count, next)), play));
    document.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || dialog.open || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      if (event.target.closest && event.target.closest("input, select, textarea, .scroll")) return;
      const box = node.getBoundingClientRect();
      if (box.top > innerHeight * 0.8 || box.bottom < innerHeight * 0.2) return;
      event.preventDefault();
      move(event.key === "ArrowRight" ? 1 : -1);
    });
    draw();
    return (target) => { jump(target); node.scrollIntoView(); play.focus({ preventScroll: true }); };
  }

  // Cost, data, provenance

  function cost() {
    const rows = data.costs.map((c) => row([[swatch(c.policy), title(c.policy)], duration(c.seconds), ...["steps", "num_trajectories", "generated_tokens", "prefill_tokens", "searches"].map((name) => { const cell = find(c.policy, name, { mode: "training" }); return cell ? number(cell, short(cell.value)) : "\u2013"; }), duration(c.evaluate_seconds)]));
    section("cost", "Cost", "Means over seeds. Seconds were measured where this page was made and are left out where a stage's result came from a cache; of a stage that was killed and went on they cover its last attempt.",
      h("div", { class: "grid" }, h("div", { class: "card" }, sortable(table(["policy", "making it", "steps", "trajectories", "generated tokens", "prefilled tokens", "searches", "evaluating it"], rows))), costOfSteps(), costOfSpeed(), costOfServices()));
  }
  // What training spent its seconds on: one bar for each system, as long as its share of the slowest one's.
  const PART_COLOUR = { play: "var(--p0)", search: "var(--p5)", score: "var(--p4)", logprobs: "var(--p7)", learn: "var(--p1)", hand_over: "var(--p9)", validate: "var(--p2)", save: "var(--soft)" };
  function costOfSteps() {
    const { parts, policies } = data.step_seconds, names = order.filter((policy) => policies[policy]);
    const total = (policy) => Object.values(policies[policy]).reduce((a, b) => a + b, 0), longest = Math.max(...names.map(total));
    const shown = parts.filter(([part]) => names.some((policy) => policies[policy][part] > 0));
    if (!shown.length) return false;
    const bar = (policy) => {
      let at = 0;
      const label = `${title(policy)}: ${duration(total(policy))}; ${shown.map(([part, name]) => `${name} ${duration(policies[policy][part])}`).join(", ")}`;
      return s("svg", { class: "errorbar", viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": label }, shown.map(([part, name]) => {
        const x = at, wide = 1000 * policies[policy][part] / longest, text = `${title(policy)}, ${name}: ${duration(policies[policy][part])} (${fraction(policies[policy][part] / total(policy))})`;
        at += wide;
        return wide > 0 && s("rect", { x, y: 0, width: wide, height: 20, fill: PART_COLOUR[part], onpointermove: (event) => showTip(text, event.clientX, event.clientY), onpointerleave: hideTip });
      }));
    };
    const speed = (policy) => { const cell = find(policy, "generated_tokens", { mode: "training" }); return cell ? `${short(cell.value / total(policy))} written tokens/s of training` : ""; };
    return h("div", { class: "card steps" }, h("h3", {}, "Where the seconds of training go"), h("div", { class: "legend" }, shown.map(([part, name, meaning]) => h("span", { title: meaning }, h("span", { class: "swatch", "--c": PART_COLOUR[part] }), name))),
      h("div", { class: "errorbars" }, names.map((policy) => [h("span", {}, title(policy), h("span", { class: "range" }, `${duration(total(policy))} ${speed(policy)}`)), bar(policy)])),
      h("p", { class: "note" }, "Means over seeds, as far as the last attempt and its checkpoints know. Work that another process does beside it counts as far as training waited for it."));
  }
  // Tokens and operations a second, and memory, where the ledger has the training of every seed.
  function costOfSpeed() {
    const names = order.filter((policy) => data.speed[policy]), found = names.map((policy) => data.speed[policy]);
    if (!names.length) return false;
    const operations = (value) => (!known(value) ? "\u2013" : value >= 1e12 ? `${(value / 1e12).toFixed(1)} T` : `${(value / 1e9).toFixed(1)} G`);
    const megabytes = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "\u2013");
    const ofLimit = ({ share, limit }) => (known(share) ? [fraction(share), h("span", { class: "range" }, `of ${operations(limit)}`)] : "unknown");
    const line = (policy, ...cells) => row([[swatch(policy), title(policy)], ...cells.map((cell) => h("td", {}, cell))]);
    const speeds = names.map((policy, i) => line(policy, ...["written", "prefilled", "trained", "read_in_learning"].map((name) => short(found[i][name])), operations(found[i].flop_per_s), ofLimit(found[i])));
    const MEMORY = { stage_mb: "stage", largest_worker_mb: "largest worker", sum_mb: "stage and workers", largest_gpu_mb: "largest on GPUs", sum_gpu_mb: "all on GPUs" };
    const held = Object.keys(MEMORY).filter((name) => found.some(({ memory }) => known(memory[name])));
    const memories = names.map((policy, i) => line(policy, ...held.map((name) => megabytes(found[i].memory[name]))));
    const all = (name) => [...new Set(found.flatMap((one) => one[name]))].join("; ");
    return h("div", { class: "card speed" }, h("h3", {}, "Tokens, operations and memory of training"),
      table(["policy", "play: written tokens/s", "read tokens/s", "learning: trained tokens/s", "read tokens/s", "FLOP/s", "share of the limit"], speeds),
      h("p", { class: "note" }, "All seeds together, over the seconds of play or of learning. FLOP: floating-point operations that the models need for the tokens that learning read, 6 for each of their weights and those of attention. The limit is what the devices could do with matrix products alone",
        all("devices") ? `: ${all("devices")} (${all("sources")}).` : ", which is not known here."),
      held.length > 0 && [table(["peak memory, MB", ...held.map((name) => MEMORY[name])], memories),
        h("p", { class: "note" }, "The most that a process held, of the seed that held most; a page that processes share counts for each. Of GPUs: what torch took.")]);
  }
  function costOfServices() {
    const rows = data.services.map((used) => row([[data.policies.some((p) => p.name === used.who) && swatch(used.who), title(used.who)], ...[used.stage, used.role.replaceAll("_", " ")].map((text) => h("td", { class: "left" }, text)), ...["calls", "tokens", "failures", "hits"].map((name) => short(used[name])), duration(used.seconds)]));
    return rows.length > 0 && h("div", { class: "card services" }, h("h3", {}, "Services: models that a stage calls beside the policy"), sortable(table(["for", ...["in", "service"].map((text) => h("span", { class: "left" }, text)), "calls", "tokens", "failures", "from a cache", "waited"], rows)),
      h("p", { class: "note" }, "Means over seeds. A failure is an answer that could not be used; what a method does then stands on its page. Cache and seconds were measured where this page was made."));
  }
  function looksFine(value) { return value === true ? h("span", { class: "up" }, "\u2713 passed") : value === false ? h("span", { class: "down" }, "\u2717 failed") : null; }
  function validation() {
    const suites = Object.entries(data.validation || {});
    if (!suites.length || !suites.every(([, suite]) => suite && Array.isArray(suite.expectations))) return document_(data.validation);
    const rows = suites.map(([name, suite]) => {
      const good = suite.expectations.filter((one) => one.success).length, total = suite.expectations.length;
      return row([name, Number(suite.rows).toLocaleString("en"), h("span", { class: good === total ? "up" : "down" }, `${good === total ? "\u2713" : "\u2717"} ${good} of ${total} hold`)]);
    });
    const details = suites.map(([name, suite]) => h("details", {}, h("summary", {}, `Rules for ${name}`), h("ul", { class: "rules" }, suite.expectations.map((one) =>
      h("li", { class: one.success ? null : "down" }, `${one.success ? "\u2713" : "\u2717"} `, h("b", {}, String(one.column ?? "")), " ", String(one.meaning || one.expectation))))));
    return h("div", {}, table(["file", "rows", "expectations"], rows), details);
  }
  // A document of unknown shape: lists of objects as tables, the rest as pairs.
  function document_(value) {
    if (value === null || typeof value !== "object") return h("p", {}, String(value));
    const simple = [], parts = [];
    for (const [key, item] of Object.entries(value)) {
      if (Array.isArray(item) && item.length && item.every((one) => one && typeof one === "object" && !Array.isArray(one))) {
        const worded = (name) => (typeof item[0][name] === "string" ? 0 : 1);
        const columns = [...new Set(item.flatMap((one) => Object.keys(one)))].sort((a, b) => worded(a) - worded(b)).slice(0, 8);
        const text = (one) => (one === undefined || one === null ? "" : typeof one === "object" ? JSON.stringify(one) : String(one));
        parts.push(h("h3", {}, key.replaceAll("_", " ")), table(columns.map((column) => column.replaceAll("_", " ")), item.slice(0, 60).map((one) => row(columns.map((column) => looksFine(one[column]) || text(one[column])))), { class: "wrap" }));
      } else simple.push(...flat(item, key).map(([name, text]) => [name, text.length > 300 ? `${text.slice(0, 300)}\u2026` : text]).map(([name, one]) => [name.replaceAll("_", " "), one === "true" && /success|valid|passed/.test(name) ? looksFine(true) : one]));
    }
    return h("div", {}, simple.length > 0 && pairs(simple.slice(0, 80)), parts);
  }
  function augmentation() {
    return h("div", { class: "card" }, h("h3", {}, "Augmentation: sub-questions and queries"), h("p", { class: "note" }, data.augmentation.line),
      data.augmentation.steps.length > 0 && table(["step", "count"], data.augmentation.steps.map((step) => row(step))));
  }
  function dataSection() {
    const names = data.recall_metrics;
    const recall = Object.entries(data.recall).map(([dataset, r]) => row([dataset, r.num_questions, ...names.map((name) => { const cell = find("retriever", name, { dataset, mode: "search" }); return value(cell) || "\u2013"; })]));
    const pick = (name, metric, dataset) => find(`retriever:${name}`, metric, { dataset, mode: "search" });
    const compared = [...new Set(data.cells.filter((c) => c[0].startsWith("retriever:")).map((c) => c[2]))].sort().flatMap((dataset) => [...data.retrievers, ...data.differences].map((name) => {
      const found = data.compared_metrics.map((metric) => pick(name, metric, dataset));
      const any = found.find(Boolean);
      return any && row([dataset, h("td", { class: "left" }, name), any.count, ...found.map((cell) => (data.differences.includes(name) ? difference(cell) : share(cell)) || "\u2013")]);
    }).filter(Boolean));
    section("data", "Data and retrieval", null, data.faults.map((line) => h("p", { class: "note down" }, `Data: ${line}.`)), h("div", { class: "grid" },
      h("div", { class: "card" }, h("h3", {}, "The retriever alone"), table(["dataset", "questions", ...names], recall), h("p", { class: "note" }, "The question itself is the query. recall@k: share of the gold passages among the first k, over questions whose gold passages are all known; all_gold: all of them found; answer: a passage holds an answer.")),
      compared.length > 0 && h("div", { class: "card" }, h("h3", {}, "Retrievers compared"), table(["dataset", h("span", { class: "left" }, "retriever"), "questions", ...data.compared_metrics], compared), h("p", { class: "note" }, "As above, each with a 95% bootstrap interval over questions; differences are paired by question.")),
      augmentation(),
      h("div", { class: "card" }, h("h3", {}, "Validation: what the data must fulfil"), validation())),
    h("details", {}, h("summary", {}, "Data manifest"), h("div", { class: "card" }, document_(data.manifest))));
  }
  function provenance() {
    const rows = [];
    const hash = (text) => h("code", { title: text }, text ? text.slice(0, 12) : "\u2013");
    const cellsOf = (stage) => { const l = stage.ledger || {}; return [l.git_commit ? h("span", {}, hash(l.git_commit), l.git_dirty ? " *" : "") : "\u2013", l.mlflow_run_id ? hash(l.mlflow_run_id) : "\u2013", duration(l.seconds)]; };
    for (const stage of data.data_stages) rows.push(row([h("code", {}, stage.stage), "", "", ...cellsOf(stage), h("td", { class: "left" }, h("code", {}, stage.command))]));
    const first = new Set();
    for (const policy of order) {
      for (const seed of data.seeds) {
        const found = data.provenance[`${policy}-${seed}`];
        if (!found) continue;
        for (const stage of [...found.stages].reverse()) {
          if (first.has(stage.stage)) continue;
          first.add(stage.stage);
          rows.push(row([h("code", {}, stage.stage), hash(found.data_sha256), hash(found.policy_sha256), ...cellsOf(stage), h("td", { class: "left" }, h("code", {}, stage.command))]));
        }
      }
    }
    const settings = order.map((policy) => { const p = data.provenance[`${policy}-${data.seeds[0]}`]; return p && h("details", {}, h("summary", {}, `Main settings of ${title(policy)}`), pairs(flat({ evaluation: p.settings, ...(p.training_settings ? { training: p.training_settings } : {}) }))); });
    section("provenance-list", "Provenance", "Every stage behind the numbers above. The same code, settings, data and seeds give the same results.csv, byte for byte; a star marks a commit with local changes.",
      h("div", { class: "card" }, table(["stage", "data", "policy", "commit", "MLflow run", "took", h("span", { class: "left" }, "reproduce")], rows)), settings);
  }

  // Tables made elsewhere, of text; a column with words is set to the left.

  const VERDICT = { reproduced: "up", "(reproduced)": "up", "not reproduced": "down", "(not reproduced)": "down", harms: "down", "(harms)": "down" };
  const FOLDED = ["printed", "audit", "reward-models-turns"];  // Long, or no result of this run.
  function extra(id) {
    const one = data.sections.find((found) => found.id === id);
    if (!one) return;
    const isLeft = one.header.map((_, i) => i === 0 || one.rows.some((cells) => cells[i] && !/^[+\-]?\d/.test(cells[i])));
    const set = (text, i) => h("td", { class: [isLeft[i] && "left", VERDICT[text]].filter(Boolean).join(" ") || null }, text);
    const made = table(one.header.map((text, i) => (isLeft[i] ? h("span", { class: "left" }, text) : text)), one.rows.map((cells) => row(cells.map(set))), { class: "extra" });
    const card = h("div", { class: "card" }, one.rows.every((cells) => cells[0]) ? sortable(made) : made);
    section(id, one.title, one.lead, h("div", { class: "grid" },
      one.series.length > 0 && h("div", { class: "card" }, legend(one.series.map((line) => line.policy)), chart({ series: one.series.map(bandOf), width: narrow() ? 330 : 1000, height: narrow() ? 240 : 300, xName: one.axes[0], diagonal: one.has_diagonal, label: `${one.axes[1]} against ${one.axes[0]}`, format: (v) => v.toFixed(3) })),
      FOLDED.includes(id) ? h("details", {}, h("summary", {}, `${one.rows.length} lines`), card) : card));
  }
  function bandOf(line) {
    const at = (place) => line.points.map((point) => [point[0], point[place]]);
    const [mean, low, high] = [at(1), at(2), at(3)];
    const isWide = line.points.some((point) => point[3] > point[2]);
    return { policy: line.policy, mean, band: isWide && [...low, ...[...high].reverse()], seeds: isWide ? [{ points: low }, { points: high }] : [{ points: mean }] };
  }

  results();
  const hopValues = [...new Set(data.cells.map((c) => c[3]))].filter((value) => value !== "all").sort((a, b) => a - b);
  breakdown("hops", hopValues, "By number of hops", "A hop is one fact that must be found before the next can be searched for.", (value) => `${value} ${value === "1" ? "hop" : "hops"}`);
  const datasets = [...new Set(data.cells.filter((c) => c[5] === "em").map((c) => c[2]))].filter((value) => value !== "all");
  if (datasets.length > 1) breakdown("dataset", datasets, "By dataset", null, (value) => value);
  parts();
  extra("claims");
  if (data.no_claims) section("claims", "Claims of the papers", data.no_claims);
  if (trained.length) learning();
  extra("budget");
  for (const id of ["reward-models", "reward-models-turns", "reward-models-later", "audit"]) extra(id);
  let read = () => {};
  errorsSection((target) => read(target));
  read = viewer();
  if (trained.length) health();
  extra("health-table");
  extra("signal");
  for (const one of data.sections) if (one.id !== "printed" && !document.getElementById(one.id)) extra(one.id);
  extra("printed");
  cost();
  dataSection();
  provenance();
})();
