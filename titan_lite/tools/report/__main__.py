import sys

from titan_lite.tools.report.page import main

sys.exit(main(sys.argv[1:]))
