"""Opens pages in a headless Chromium or Chrome, if one is installed."""

import html
import json
import re
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next((path for name in NAMES if (path := shutil.which(name))), None)
WHY_NOT = f"no browser: none of {', '.join(NAMES)} is installed"

_MEASURE = """
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const shown = name => [...page.querySelectorAll(name)].filter(it => it.getBoundingClientRect().width > 0).length;
    const cut = text => {
      const own = text.getBoundingClientRect(), chart = text.closest("svg").getBoundingClientRect();
      return own.left < chart.left - 1 || own.right > chart.right + 1;
    };
    return {
      width: root.clientWidth,
      content: root.scrollWidth,
      bars: shown(".bar"),
      charts: shown("svg"),
      cut: [...page.querySelectorAll("svg text")].filter(cut).map(it => it.textContent),
      texts: [...page.querySelectorAll("td.text")].map(it => it.getBoundingClientRect().right),
      resources: frame.contentWindow.performance.getEntriesByType("resource").length,
    };
  });
  document.querySelector("#found").textContent = JSON.stringify(found);
});
</script><pre id="found"></pre>
"""


def measure(page, widths, folder):
    """Shows a page at several widths in pixels; returns what is seen at each, see `_MEASURE`."""
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>' for width in widths)
    dumped = _run(folder, f"<!doctype html>{frames}{_MEASURE}", "--dump-dom", "--virtual-time-budget=5000")
    [found] = re.findall('<pre id="found">(.*?)</pre>', dumped)
    return json.loads(html.unescape(found))


def print_pdf(page, folder):
    """Prints a page; returns the PDF's bytes."""
    _run(folder, page, f"--print-to-pdf={folder / 'page.pdf'}", "--no-pdf-header-footer")
    return (folder / "page.pdf").read_bytes()


def _run(folder, page, *options):
    (folder / "page.html").write_text(page, encoding="utf-8")
    given = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1600,1200",
        f"--user-data-dir={folder / 'user'}",
    ]
    command = [PATH, *given, *options, (folder / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
