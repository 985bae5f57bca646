import sys

from titan_lite.plan.command import main

sys.exit(main(sys.argv[1:]))
