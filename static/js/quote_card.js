// The card #quote beside a form: one order per quote, and no order of an expired quote.

/** Watch the quotes of a form. `showQuote` is called after each. */
export const watchQuote = (form, showQuote = () => {}) => {
  // Enter must not submit the form: htmx requests the quote.
  form.addEventListener("submit", (event) => event.preventDefault());

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-requote]")) window.htmx.trigger(form, "requote");
  });

  // While an order is being placed, its quote stays: a double click must not buy a new quote that replaced it.
  let isOrdering = false;
  const isOrder = (element) => Boolean(element.closest?.("#order, #pay"));
  document.addEventListener("htmx:beforeRequest", (event) => {
    const { elt } = event.detail;
    if (isOrdering && (elt === form || isOrder(elt))) event.preventDefault();
    else if (isOrder(elt)) isOrdering = true;
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (isOrdering && event.detail.requestConfig.elt === form) event.detail.shouldSwap = false;
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    const { elt, xhr } = event.detail;
    if (isOrder(elt) && !xhr.getResponseHeader("HX-Redirect")) isOrdering = false;
  });

  // An expired quote cannot be bought. The card then offers a new one.
  let expires = Infinity;
  const showExpiry = () => {
    const isOver = Date.now() >= expires;
    for (const button of document.querySelectorAll("#quote [data-while-valid]")) button.disabled = button.disabled || isOver;
    for (const element of document.querySelectorAll("#quote [data-until-expired]")) element.hidden = isOver;
    for (const element of document.querySelectorAll("#quote [data-once-expired]")) element.hidden = !isOver;
  };
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.target.id !== "quote") return;
    showQuote();
    const seconds = event.target.querySelector("[data-seconds-left]")?.dataset.secondsLeft;
    expires = seconds === undefined ? Infinity : Date.now() + Number(seconds) * 1000;
    showExpiry();
  });
  setInterval(showExpiry, 1000);
};
