// What every page does: theme buttons, toasts, copy buttons, questions before dangerous acts, forms that are sent once,
// controls that send their form. All by data attributes; there are no inline handlers.

const copy = async (button) => {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
  } catch {
    const input = button.parentElement.querySelector("input");
    input?.select();
    document.execCommand("copy");
  }
  button.dataset.copied = "";
  setTimeout(() => delete button.dataset.copied, 1600);
};

document.addEventListener("click", (event) => {
  const theme = event.target.closest("[data-theme]");
  if (theme) window.trainyardTheme(theme.dataset.theme);
  const copied = event.target.closest("[data-copy]");
  if (copied) copy(copied);
  if (event.target.closest("[data-print]")) window.print();
});

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-autosubmit]")) event.target.form.requestSubmit();
});

/** Ask before sending; the form is sent once the person agrees. */
const confirmThen = (form, submitter) => {
  const dialog = document.getElementById("confirm");
  dialog.querySelector("#confirm-question").textContent = form.dataset.confirm;
  dialog.querySelector("[data-confirm-detail]").textContent = form.dataset.confirmDetail ?? "";
  const yes = dialog.querySelector("[data-confirm-yes]");
  yes.textContent = form.dataset.confirmYes;
  const modal = window.tabler.bootstrap.Modal.getOrCreateInstance(dialog);
  yes.onclick = () => {
    form.dataset.confirmed = "";
    modal.hide();
    form.requestSubmit(submitter);
  };
  modal.show();
};

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.confirm && !("confirmed" in form.dataset)) {
    event.preventDefault();
    confirmThen(form, event.submitter);
    return;
  }
  if (event.defaultPrevented || form.method !== "post" || form.hasAttribute("hx-post")) return;
  if ("sent" in form.dataset) {
    event.preventDefault();
    return;
  }
  form.dataset.sent = "";
  event.submitter?.classList.add("btn-loading");
});

// A page that comes back from the browser's memory can be used again.
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent);
  document.querySelectorAll(".btn-loading").forEach((button) => button.classList.remove("btn-loading"));
});

document.querySelectorAll("#toasts .toast").forEach((element) => window.tabler.bootstrap.Toast.getOrCreateInstance(element).show());

// Quick picks: fill a field with a value.
document.addEventListener("click", (event) => {
  const pick = event.target.closest("[data-fill]");
  if (!pick) return;
  const field = document.querySelector(pick.dataset.fill);
  field.value = pick.dataset.value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.focus();
});
