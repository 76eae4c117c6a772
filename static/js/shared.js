// What several pages' modules use. The one rule: loading this does nothing, since its address may be loaded twice over
// (hashed by the page, plain by an import).

export const csrf = () => document.body.dataset.csrf ?? "";

/** Show a sentence as a toast. `level` is "error" or "success". */
export const toast = (sentence, level = "error") => {
  const holder = document.getElementById("toasts");
  const element = document.createElement("div");
  element.className = "toast";
  element.setAttribute("role", level === "error" ? "alert" : "status");
  element.dataset.bsAutohide = level === "error" ? "false" : "true";
  element.innerHTML = '<div class="toast-body d-flex gap-2"><span class="flex-fill"></span><button class="btn-close" type="button" data-bs-dismiss="toast"></button></div>';
  element.querySelector("span").textContent = sentence;
  holder.append(element);
  window.tabler.bootstrap.Toast.getOrCreateInstance(element).show();
};
