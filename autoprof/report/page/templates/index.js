"use strict";
// Hands the trace to Perfetto's page in a window of its own: it answers PONG when it can take it. That works on any port.
for (const button of document.querySelectorAll("button")) {
  const perfetto = button.dataset.perfetto;
  const say = (text) => (document.getElementById("said").textContent = text);
  button.addEventListener("click", async () => {
    const page = open(perfetto);
    if (!page) {
      say("The browser let no window open: allow it for this page, and try again.");
      return;
    }
    say("Reading the trace ...");
    let buffer;
    try {
      const answer = await fetch(button.dataset.trace);
      if (!answer.ok) {
        throw new Error(answer.status);
      }
      buffer = await answer.arrayBuffer();
    } catch (error) {
      page.close();
      say("The trace could not be read (" + error.message + "); does autoprof open still run?");
      return;
    }
    const asking = setInterval(() => page.postMessage("PING", perfetto), 100);
    const heard = (event) => {
      if (event.source !== page || event.origin !== perfetto || event.data !== "PONG") {
        return;
      }
      clearInterval(asking);
      removeEventListener("message", heard);
      page.postMessage({ perfetto: { buffer, title: button.dataset.title } }, perfetto, [buffer]);
      say("Perfetto has the trace.");
    };
    addEventListener("message", heard);
    say("Waiting for Perfetto ...");
  });
}
