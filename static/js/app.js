// Behaviour of all pages: theme buttons, toasts, copy buttons, confirmation of dangerous actions, forms that are sent once,
// controls that submit their form or open a page. Elements ask for it with data attributes, because pages may not have
// inline scripts.

// The server formats times in the zone of this cookie, from the next page on.
const zone = encodeURIComponent(Intl.DateTimeFormat().resolvedOptions().timeZone ?? "");
if (zone && !document.cookie.split("; ").includes(`time_zone=${zone}`)) {
  const secure = location.protocol === "https:" ? "; secure" : "";
  document.cookie = `time_zone=${zone}; path=/; max-age=31536000; samesite=lax${secure}`;
}

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
  if (event.target.matches("[data-open-page]")) location.assign(event.target.value);
});

// Leave empty fields out of the URL of a search.
document.addEventListener("submit", (event) => {
  if (!event.target.matches("[data-omit-empty]")) return;
  for (const control of event.target.elements) {
    if (control.name && !control.value) control.disabled = true;
  }
});

/** Ask for confirmation, then submit the form, even if htmx has replaced that part of the page meanwhile. */
const confirmThen = (form, submitter) => {
  const dialog = document.getElementById("confirm");
  dialog.querySelector("#confirm-question").textContent = form.dataset.confirm;
  dialog.querySelector("[data-confirm-detail]").textContent = form.dataset.confirmDetail ?? "";
  const names = form.dataset.confirmNames ? [...document.querySelectorAll(form.dataset.confirmNames)] : [];
  dialog.querySelector("[data-confirm-names]").replaceChildren(
    ...names.map((box) => Object.assign(document.createElement("li"), { textContent: box.getAttribute("aria-label") })),
  );
  const yes = dialog.querySelector("[data-confirm-yes]");
  yes.textContent = form.dataset.confirmYes;
  const no = dialog.querySelector("[data-confirm-no]");
  no.textContent = form.dataset.confirmNo ?? no.dataset.confirmNo;
  const word = form.dataset.confirmType;
  const typed = dialog.querySelector("[data-confirm-type]");
  const field = typed.querySelector("input");
  typed.hidden = !word;
  typed.querySelector("[data-confirm-word]").textContent = word ?? "";
  field.value = "";
  yes.disabled = Boolean(word);
  field.oninput = () => { yes.disabled = field.value.trim() !== word; };
  field.onkeydown = (event) => { if (event.key === "Enter" && !yes.disabled) yes.click(); };
  dialog.addEventListener("shown.bs.modal", () => { if (word) field.focus(); }, { once: true });
  const modal = window.tabler.bootstrap.Modal.getOrCreateInstance(dialog);
  yes.onclick = () => {
    form.dataset.confirmed = "";
    modal.hide();
    if (!form.isConnected) {
      form.hidden = true;
      document.body.append(form); // a form outside the document cannot be submitted
    }
    form.requestSubmit(submitter);
  };
  modal.show();
};

document.addEventListener("submit", (event) => {
  const form = event.target;
  const opensTab = form.target === "_blank" || event.submitter?.formTarget === "_blank";
  const isOtherAction = event.submitter?.hasAttribute("formaction"); // the question is about the form's own action
  if (form.dataset.confirm && !opensTab && !isOtherAction && !("confirmed" in form.dataset)) {
    event.preventDefault();
    confirmThen(form, event.submitter);
    return;
  }
  if (opensTab || event.defaultPrevented || form.method !== "post" || form.hasAttribute("hx-post")) return;
  if ("sent" in form.dataset) {
    event.preventDefault();
    return;
  }
  form.dataset.sent = "";
  event.submitter?.classList.add("btn-loading");
});

// When htmx refreshes the rows of jobs, the selected boxes stay selected.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target?.id !== "job-rows") return;
  const ticked = [...event.detail.target.querySelectorAll("input[name=job]:checked")].map((box) => box.id);
  document.addEventListener("htmx:afterSwap", () => {
    for (const id of ticked) {
      const box = document.getElementById(id);
      if (box) box.checked = true;
    }
  }, { once: true });
});

// Make forms usable when the browser restores a page from its back/forward cache.
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  document.querySelectorAll("[data-omit-empty] :disabled").forEach((control) => { control.disabled = false; });
  document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent);
  document.querySelectorAll(".btn-loading").forEach((button) => button.classList.remove("btn-loading"));
});

document.querySelectorAll("#toasts .toast").forEach((element) => window.tabler.bootstrap.Toast.getOrCreateInstance(element).show());

// Buttons that fill a field with a value, such as a suggested amount.
document.addEventListener("click", (event) => {
  const pick = event.target.closest("[data-fill]");
  if (!pick) return;
  const field = document.querySelector(pick.dataset.fill);
  field.value = pick.dataset.value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.focus();
});

// If the session ended while the page was open, the values of forms with data-keep are restored after the log-in, in the
// same tab and for the same person only.
const STORAGE_KEY = "trainyard-kept";
const pageUrl = location.pathname + location.search;

const promptLogIn = () => {
  const forms = Object.fromEntries([...document.querySelectorAll("form[data-keep]")].map((form) => [form.id, [...new FormData(form)]]));
  sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ place: pageUrl, person: document.body.dataset.person, forms }));
  const dialog = document.getElementById("signed-out");
  const link = dialog.querySelector("[data-sign-in]");
  link.search = new URLSearchParams({ next: pageUrl });
  window.tabler.bootstrap.Modal.getOrCreateInstance(dialog).show();
};

document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status === 401) promptLogIn();
});
document.addEventListener("trainyard:signed-out", promptLogIn);

const fill = (form, entries) => {
  for (const [name, value] of entries) {
    const control = form.elements.namedItem(name);
    const box = form.querySelector(`input[type="checkbox"][name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
    if (box) box.checked = true;
    else if (control) control.value = value;
  }
};

const stored = JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "null");
if (stored?.place === pageUrl) {
  sessionStorage.removeItem(STORAGE_KEY);
  if (stored.person === document.body.dataset.person) {
    for (const [id, entries] of Object.entries(stored.forms)) {
      const form = document.getElementById(id);
      if (form) fill(form, entries);
    }
  }
}
