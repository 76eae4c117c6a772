// The form of a new notebook. Quotes themselves are asked for by htmx.
import { watchQuote } from "./quote_card.js";

watchQuote(document.getElementById("notebook-form"));
