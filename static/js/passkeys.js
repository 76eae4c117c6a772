// Adds to allauth's scripts on pages with passkeys: shows why a passkey cannot be used, and errors.

const error = document.getElementById("passkey-error");
const buttons = document.querySelectorAll("[data-passkey]");
buttons[0]?.closest("form, main, .card-body")?.append(error);

const show = (text) => {
  error.textContent = text;
  error.hidden = false;
};

// Browsers offer passkeys in secure contexts only, and never for a console that is opened by its IP address.
const isAddress = /^[0-9.]+$|:/.test(location.hostname);
if (!window.PublicKeyCredential || isAddress) {
  buttons.forEach((button) => {
    button.disabled = true;
    button.title = error.dataset.unavailable;
  });
  if (document.querySelector("[data-passkey-only]")) show(error.dataset.unavailable);
}

document.addEventListener("allauth.error", (event) => {
  event.preventDefault();
  show(error.dataset.refused);
});
