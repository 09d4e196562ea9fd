// Prints the path of a Chromium, unpacked from a package, for the tests of the console.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
