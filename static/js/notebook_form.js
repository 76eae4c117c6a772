// The form of a new notebook. htmx requests the quotes.
import { watchQuote } from "./quote_card.js";

watchQuote(document.getElementById("notebook-form"));
