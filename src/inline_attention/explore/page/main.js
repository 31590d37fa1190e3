// The tabs of the page, and what each needs from the server.

import { startCost } from "./cost.js";
import { ask, byId } from "./dom.js";
import { startImage } from "./image.js";
import { startPlane } from "./plane.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab, { focus = false } = {}) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  tab.dispatchEvent(new Event("show"));
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(tabs.at(to % tabs.length), { focus: true });
  });
}

startCost(byId("tab-cost"));
const setup = ask("/api/setup");
setup.then(
  ({ plane }) => {
    startPlane(plane);
    document.querySelector("main").hidden = false; // only now: nothing moves while the page fills
  },
  (error) => {
    byId("failure").textContent = error.message;
    byId("failure").hidden = false;
  },
);
// The models run only when their tab is opened.
byId("tab-image").addEventListener("show", () => setup.then(startImage, () => {}), { once: true });
show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
