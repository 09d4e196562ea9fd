/** Imported first: uPlot formats numbers in the browser's language when it is loaded, and fails where that is no language
 * tag, such as `en-US@posix` of a browser started with LANG=C. */

try {
  Intl.NumberFormat.supportedLocalesOf(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
