"""The one thing that the browser must find out for itself: that the process which feeds its page is gone."""

LOST_CONNECTION = """
<div id="tg-lost" role="alert" hidden></div>
<script>
(() => {
  const mark = document.getElementById("tg-lost");
  let seen = Date.now();
  setInterval(() => {
    if (!window.socket || window.socket.connected) seen = Date.now();
    const seconds = Math.round((Date.now() - seen) / 1000);
    const lost = seconds >= 2;
    mark.hidden = !lost;
    document.body.classList.toggle("tg-lost", lost);
    if (lost) mark.textContent = `Controller unreachable: last seen ${seconds} s ago. Trying again.`;
  }, 500);
})();
</script>
"""
