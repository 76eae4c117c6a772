// Helpers of several modules. Loading this module must have no effect: a browser may load it twice, under the hashed URL
// of a page and the plain URL of an import.

export const csrf = () => document.body.dataset.csrf ?? "";

/** Show a message as a toast. `level` is "error" or "success". */
export const toast = (message, level = "error") => {
  const holder = document.getElementById("toasts");
  const element = document.createElement("div");
  element.className = "toast";
  element.setAttribute("role", level === "error" ? "alert" : "status");
  element.dataset.bsAutohide = level === "error" ? "false" : "true";
  element.innerHTML = '<div class="toast-body d-flex gap-2"><span class="flex-fill"></span><button class="btn-close" type="button" data-bs-dismiss="toast"></button></div>';
  element.querySelector("span").textContent = message;
  holder.append(element);
  window.tabler.bootstrap.Toast.getOrCreateInstance(element).show();
};
