/** Copy a text. Returns whether the browser did: without permission, or on plain http, it does not. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
