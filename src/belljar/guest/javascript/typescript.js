// TypeScript: types are taken out before a file is compiled. Lines stay where they are, columns may not.
(function (host, core) {
  "use strict";

  core.stripTypes = (text, name) => {
    const transforms = name.endsWith("x") ? ["typescript", "jsx"] : ["typescript"];
    try {
      return core.sucrase.transform(text, { transforms, disableESTransforms: true }).code;
    } catch (error) {
      const [, line, column] = /\((\d+):(\d+)\)$/.exec(error.message) ?? [0, 1, 1];
      const wrong = new SyntaxError(error.message.replace(/ \(\d+:\d+\)$/, ""));
      wrong.stack = `SyntaxError: ${wrong.message}\n    at ${name}:${line}:${column}`;
      throw wrong;
    }
  };
});
