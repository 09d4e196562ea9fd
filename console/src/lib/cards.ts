/** On a phone a table becomes a list of cards (style.css). Each cell carries the head of its column; the first is the title. */
export function cards(table: HTMLTableElement): { destroy: () => void } {
  const label = (): void => {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => cell.textContent?.trim() ?? "");
    for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
      const cells = [...row.cells];
      const lead = cells.find((cell) => !cell.classList.contains("wide"));
      for (const [index, cell] of cells.entries()) {
        if (cell === lead) cell.dataset.lead = "";
        else cell.dataset.label = heads[index] ?? "";
      }
    }
  };
  table.classList.add("cards");
  label();
  const observer = new MutationObserver(label);
  observer.observe(table, { childList: true, subtree: true });
  return { destroy: () => observer.disconnect() };
}
