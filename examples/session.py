"""One interpreter across calls: what a turn defines, the next one finds."""

import belljar

with belljar.Session(backend="native") as session:  # which lives on after a turn that took too long
    session.run("import math\nradius = 2")
    area = session.run("math.pi * radius**2")
    print("area:", area.results[0]["text/plain"])

    table = session.run("[{'r': r, 'area': round(math.pi * r * r, 2)} for r in (1, 2)]")
    print("as JSON:", table.results[0]["application/json"])

    broken = session.run("radius / 0")
    print(broken.status, broken.error.error_type)

    stuck = session.run("while True: pass", timeout=0.5)
    print(stuck.status, "- and the session lives on:", session.run("radius").results[0]["text/plain"])
