/** Save values as a JSONL file of the browser. */
export function downloadLines(name: string, values: unknown[]): void {
  const address = URL.createObjectURL(new Blob(values.map((one) => `${JSON.stringify(one)}\n`), { type: "application/jsonl" }));
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
  URL.revokeObjectURL(address);
}
