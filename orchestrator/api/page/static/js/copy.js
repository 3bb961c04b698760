// Copies a text to the clipboard, and says so on the button that was pressed.

export async function copy(button, text) {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = words), 1500);
  } catch {
    prompt("Copy it from here:", text); // a page without TLS may not write
  }
}
