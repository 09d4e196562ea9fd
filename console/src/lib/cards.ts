/** As style.css shows it: with a capital, unless it is the name of a user's thing. */
function headOf(cell: HTMLTableCellElement): string {
  const text = cell.textContent?.trim() ?? "";
  return cell.classList.contains("name") ? text : text.charAt(0).toUpperCase() + text.slice(1);
}

/** On a phone a table becomes a list of cards (style.css). Each cell carries the head of its column; the first is the title. */
export function cards(table: HTMLTableElement): { destroy: () => void } {
  const label = (): void => {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])].map(headOf);
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
