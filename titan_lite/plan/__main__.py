import signal
import sys

from titan_lite.plan.command import main

signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers and semaphores go, what is there is shown
sys.exit(main(sys.argv[1:]))
