// Sets the theme before the first paint: a small classic script in the head, so that there is no flash.
// The choice is stored in this browser only: "light", "dark", or "auto" for the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("trainyard-theme") || "auto";
  const apply = () => {
    const dark = chosen() === "dark" || (chosen() === "auto" && system.matches);
    document.documentElement.setAttribute("data-bs-theme", dark ? "dark" : "light");
  };
  // Charts, which draw their own colours, listen for the event.
  const change = () => {
    apply();
    document.dispatchEvent(new CustomEvent("trainyard:theme"));
  };
  apply();
  system.addEventListener("change", change);
  window.trainyardTheme = (choice) => {
    localStorage.setItem("trainyard-theme", choice);
    change();
  };
})();
