import sys

from titan_lite.report.page import main

sys.exit(main(sys.argv[1:]))
