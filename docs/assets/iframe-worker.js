/* Browsers start no worker for pages that are opened as files. The search then runs in a hidden frame instead, which looks
   like a worker to both sides. The theme would fetch such a script from a network; this one comes with the site. */
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          script.src = source;
          script.onload = done;
          script.onerror = failed;
          inner.document.body.append(script);
        });
      inner.importScripts = (...sources) => sources.reduce((last, next) => last.then(() => load(next)), Promise.resolve());
      this.ready = load(new URL(url, document.baseURI));
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
