/** Save a file of the browser. */
export function save(name: string, content: Blob): void {
  const address = URL.createObjectURL(content);
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
  URL.revokeObjectURL(address);
}

/** Save values as a JSONL file. */
export function downloadLines(name: string, values: unknown[]): void {
  save(name, new Blob(values.map((one) => `${JSON.stringify(one)}\n`), { type: "application/jsonl" }));
}
