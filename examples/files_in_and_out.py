"""Files go in read-only and come back by pattern; nothing is written to your own folders."""

import belljar

SALES = """\
month,amount
january,120
february,95
march,143
"""

CODE = """
import csv, json
rows = list(csv.DictReader(open("sales.csv")))
report = {"months": len(rows), "total": sum(int(row["amount"]) for row in rows)}
json.dump(report, open("report.json", "w"))
open("notes.txt", "w").write("not asked for, so it stays inside")
try:
    open("sales.csv", "w")
except OSError as error:
    print("sales.csv:", error.strerror)
"""

result = belljar.run(CODE, files={"sales.csv": SALES}, collect=["*.json"])

print(result.stdout, end="")
for file in result.files:
    print(f"{file.path}: {file.text}")
