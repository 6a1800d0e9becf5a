"use strict";
// Sends the trace to Perfetto in a new window, once Perfetto answers PONG. This works on any port.
for (const button of document.querySelectorAll("button[data-perfetto]")) {
  const perfetto = button.dataset.perfetto;
  const say = (text) => ((button.closest(".served") ?? document).querySelector("[role=status]").textContent = text);
  button.addEventListener("click", async () => {
    const page = open(perfetto);
    if (!page) {
      say("The browser blocked the new window: allow pop-ups for this page, and try again.");
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
      say("The trace could not be read (" + error.message + "); is autoprof open still running?");
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
